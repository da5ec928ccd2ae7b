"""What an evaluation found: figures, records, a table, a curve, and differences from another."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from slpo_jax.errors import UserError
from slpo_jax.evaluation.comparisons import compare_rows
from slpo_jax.evaluation.curves import pass_at_k_figure
from slpo_jax.evaluation.records import EvalRecords, arrays_of
from slpo_jax.evaluation.render import percent
from slpo_jax.evaluation.report_rows import Row
from slpo_jax.evaluation.statistics import COUNTS, defined, summarise
from slpo_jax.rewards.reward import CORRECT

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_SET = "problems"


class Difference(NamedTuple):
    """A figure's difference, paired by problem, with its 95 % bootstrap interval over problems."""

    difference: float
    low: float
    high: float


class Comparison(dict[str, Difference]):
    """The differences of an evaluation from another one, by figure, as fractions; `print` shows shares in percent."""

    def __missing__(self, key: str) -> Difference:
        raise UserError(f"compare: has no figure {key!r}; use one of {', '.join(self)}")

    def __repr__(self) -> str:
        import pandas  # takes a second

        rows = {
            (defined(key) or (key,))[0]: [
                value * (1 if key in COUNTS else 100) for value in figures
            ]
            for key, figures in self.items()
        }
        table = pandas.DataFrame.from_dict(
            rows, orient="index", columns=["difference", "95 % from", "to"]
        )
        return table.to_string(float_format="{:+.2f}".format)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A problem set as a reasoner answered it; `print` shows its figures.

    Attributes:
        records: an object a problem: question, reference, completion, answer, latent_steps, correct, cut and samples,
            as they stand in a run's eval/ROW/SET.jsonl.
        label: what figures call it.
        reward: the name of what says that a completion is right.
        milliseconds: an answer took in a batch without noise, compiling left out; None where nobody measured it.
        batch: answers in that batch.
    """

    records: Sequence[Mapping[str, Any]]
    label: str = "this reasoner"
    reward: str = CORRECT
    milliseconds: float | None = None
    batch: int = 0

    def __repr__(self) -> str:
        return f"{self.label}\n{self}"

    @functools.cached_property
    def arrays(self) -> EvalRecords:
        """The same as arrays."""
        return arrays_of(self.records)

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        """Figures by name, as fractions: n, acc, pass@k, maj@k, latent_steps, …, with standard errors as `_se`.

        Of shares that are 0 or 1, `intervals` has Wilson's of 95 %. Where time was measured, `milliseconds` is of an
        answer in a batch of `batch`.
        """
        times = (
            {}
            if self.milliseconds is None
            else {"milliseconds": self.milliseconds, "batch": self.batch}
        )
        return summarise(self.arrays) | times

    def __str__(self) -> str:
        figures = self.summary
        lines = [f"Acc     {percent(figures, 'acc')} on {figures['n']} problems"]
        ks = [
            key
            for key in figures
            if key.startswith("pass@") and key.removeprefix("pass@").isdigit()
        ]
        lines += [f"{'P' + key[1:]:<7} {percent(figures, key)}" for key in ks]
        cut = f", {100 * figures['cut']:.1f} % truncated" if figures.get("cut") else ""
        lines.append(f"{figures['latent_steps']:.1f} latents a problem on average{cut}")
        steps = f"{figures['sequential_steps']:.1f} sequential steps an answer: its latents and its tokens"
        if self.milliseconds is not None:
            steps += f"; {self.milliseconds:.3g} ms, {self.batch} together"
        return "\n".join([*lines, steps])

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a table with a row a problem; `samples` stays a list."""
        import pandas  # takes a second

        return pandas.DataFrame.from_records([dict(row) for row in self.records])

    def plot(self, *others: "Evaluation") -> "Figure":
        """Draw unbiased Pass@k over k, a line each; bands are one standard error over problems.

        Raises:
            UserError: no rollouts were sampled, or matplotlib is not installed.
        """
        evaluations = (self, *others)
        labels = [
            evaluation.label for evaluation in evaluations
        ]  # with a number where two have the same
        names = [
            f"{label} ({place})" if labels.count(label) > 1 else label
            for place, label in enumerate(labels, 1)
        ]
        try:
            figure = pass_at_k_figure(
                {name: x.arrays for name, x in zip(names, evaluations, strict=True)}
            )
        except ImportError as error:
            raise UserError(
                "plot: matplotlib is not installed; pip install 'slpo_jax[plot]'"
            ) from error
        if figure is None:
            raise UserError(
                "plot: there are no samples; evaluate with samples=16, for one"
            )
        return figure

    def compare(self, other: "Evaluation") -> Comparison:
        """Subtract the other's figures from these, as fractions; `print` shows a table in percent.

        Raises:
            UserError: they are of different problems, rewards, samples or seeds.
        """
        if not isinstance(other, Evaluation):
            raise UserError(
                f"compare: {other!r} is no evaluation; give what `evaluate` returns"
            )
        facts, other_facts = (
            (x.reward, x.arrays.seeds.tolist(), x.arrays.sample_correct.shape)
            for x in (self, other)
        )
        if facts != other_facts or not self.arrays.same_problems(other.arrays):
            raise UserError(
                "compare: the two are of other problems, rewards, samples or seeds; evaluate both alike"
            )
        arrays = {"other": {_SET: other.arrays}, "this": {_SET: self.arrays}}
        rows = {
            "other": Row("other", other.label),
            "this": Row("this", self.label, order=1, baselines=("other",)),
        }
        entries, _ = compare_rows([arrays], rows)
        return Comparison(
            {
                row["metric"]: Difference(row["difference"], row["low"], row["high"])
                for row in entries
            }
        )
