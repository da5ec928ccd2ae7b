"""The results of an evaluation: figures, records, a table, a curve, and differences from another evaluation."""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from slpo_jax.errors import UserError
from slpo_jax.evaluation.cells import percent
from slpo_jax.evaluation.comparisons import compare_rows
from slpo_jax.evaluation.curves import pass_at_k_figure
from slpo_jax.evaluation.records import EvalRecords, arrays_of
from slpo_jax.evaluation.report_rows import Row
from slpo_jax.evaluation.statistics import COUNTS, explain_figure, summarise
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

        rows = {}
        for key, difference in self.items():
            # Shares are shown in percent, under the names of the report.
            scale = 1 if key in COUNTS else 100
            definition = explain_figure(key)
            title = definition[0] if definition else key
            rows[title] = [scale * figure for figure in difference]
        table = pandas.DataFrame.from_dict(
            rows, orient="index", columns=["difference", "95 % from", "to"]
        )
        return table.to_string(float_format="{:+.2f}".format)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The answers of a reasoner to a problem set; `print` shows its figures.

    Attributes:
        records: an object a problem: question, reference, completion, answer, latent_steps, correct, cut and samples,
            as they stand in a run's eval/ROW/SET.jsonl.
        label: its name in figures.
        reward: the name of the reward that says whether a completion is right.
        milliseconds: the time of an answer in a batch without noise, without compiling; None if it wasn't measured.
        batch: the number of answers in that batch.
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
        """The records as arrays."""
        return arrays_of(self.records)

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        """Figures by name, as fractions: n, acc, pass@k, maj@k, latent_steps, …, with standard errors as `_se`.

        Of shares that are 0 or 1, `intervals` has Wilson's of 95 %. Where time was measured, `milliseconds` is of an
        answer in a batch of `batch`.
        """
        figures = summarise(self.arrays)
        if self.milliseconds is not None:
            figures = figures | {"milliseconds": self.milliseconds, "batch": self.batch}
        return figures

    def __str__(self) -> str:
        figures = self.summary
        lines = [f"Acc     {percent(figures, 'acc')} on {figures['n']} problems"]
        for key in figures:
            if re.fullmatch(r"pass@\d+", key):
                name = key.capitalize()
                lines.append(f"{name:<7} {percent(figures, key)}")
        latents = f"{figures['latent_steps']:.1f} latents a problem on average"
        if figures.get("cut"):
            latents += f", {100 * figures['cut']:.1f} % truncated"
        lines.append(latents)
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
        # Evaluations with the same label get a number.
        evaluations = (self, *others)
        labels = [evaluation.label for evaluation in evaluations]
        arrays = {}
        for number, evaluation in enumerate(evaluations, 1):
            name = evaluation.label
            if labels.count(name) > 1:
                name = f"{name} ({number})"
            arrays[name] = evaluation.arrays
        try:
            figure = pass_at_k_figure(arrays)
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
        # Pairs need the same problems, judged alike.
        alike = (
            self.reward == other.reward
            and self.arrays.seeds.tolist() == other.arrays.seeds.tolist()
            and self.arrays.sample_correct.shape == other.arrays.sample_correct.shape
            and self.arrays.same_problems(other.arrays)
        )
        if not alike:
            raise UserError(
                "compare: the two are of other problems, rewards, samples or seeds; evaluate both alike"
            )

        # Compare them as a report compares two rows.
        arrays = {"other": {_SET: other.arrays}, "this": {_SET: self.arrays}}
        rows = {
            "other": Row("other", other.label),
            "this": Row("this", self.label, order=1, baselines=("other",)),
        }
        entries, _ = compare_rows([arrays], rows)
        comparison = Comparison()
        for entry in entries:
            comparison[entry["metric"]] = Difference(
                entry["difference"], entry["low"], entry["high"]
            )
        return comparison
