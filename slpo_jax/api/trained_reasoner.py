"""Ask, evaluate and export a trained reasoner in Python."""

import copy
import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from slpo_jax.api.evaluation import Evaluation
from slpo_jax.api.load_options import by_argument
from slpo_jax.api.solver import (
    Solution,
    Solver,
    Vote,
    encode_question,
    load_solver,
    solve_all,
    vote,
)
from slpo_jax.checkpoints.checkpoint import Checkpoint
from slpo_jax.checkpoints.export import (
    ending_settings,
    export_adapters,
    replaced_by_export,
    write_export,
)
from slpo_jax.checkpoints.external_layouts import with_decoder
from slpo_jax.checkpoints.saved_config import config_to_keep
from slpo_jax.config.config import Config, ends_at
from slpo_jax.config.overrides import merge_settings
from slpo_jax.data.batches import EncodedProblems, pad_prompts
from slpo_jax.data.problem import Problem, Problems
from slpo_jax.data.record_readers import is_dataset_dict
from slpo_jax.errors import UserError, about
from slpo_jax.evaluation.completions import record_rows
from slpo_jax.io.files import check_free
from slpo_jax.models.parts import GATE, REASONER
from slpo_jax.models.reasoner import BACKBONE
from slpo_jax.policy import noise
from slpo_jax.policy.latent_policies import LatentPolicyConfig
from slpo_jax.policy.policy import Prompts
from slpo_jax.policy.rollout import sample
from slpo_jax.rewards.answers import STYLES
from slpo_jax.rewards.reward import Reward
from slpo_jax.run.setup import Setup
from slpo_jax.run.sources import TRAIN, VALID, load_set, made_with, read_as
from slpo_jax.runtime.backend import set_up_jax

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def describe(solver: Solver, solution: Solution) -> str:
    """Write a solution for a terminal of 100 columns."""
    answer = solution.answer
    if answer is None:
        reason = STYLES[solver.setup.template.answer_style].none
        if solution.cut:
            reason = "no end, so what it says last may be truncated"
        answer = f"none: the text has {reason}"
    indent = "\n          "
    question = indent.join(solution.question.strip().splitlines())
    text = indent.join(solution.text.strip().splitlines()) or "nothing"

    lines = [
        f"from      {solver.setup.config.init}",
        f"question  {question}",
        f"answer    {answer}",
        f"text      {text}",
    ]
    if solution.cut:
        most = solver.setup.evaluator.policy.config.answer_slots
        lines.append(
            f"truncated at {most} tokens, before it ended; --max_answer_tokens={2 * most} lets it go on"
        )
    lines.append(f"thought   {_describe_end(solver, solution)}")
    if solution.latents:
        lines += ["", *_describe_latents(solver, solution)]
    return "\n".join(lines)


def _describe_latents(solver: Solver, solution: Solution) -> list[str]:
    """Write a table of latents, a line each, and a second one with the words of a thought that ends there."""
    stop = "stop  " if solver.setup.config.gate.enabled else ""
    lines = [f"latent  {stop}likeliest tokens in its place, and probability"]

    # The columns are as wide as the longest token.
    width = 0
    for latent in solution.latents:
        for token, _ in latent.likeliest:
            width = max(width, len(_shorten(token)))

    for step, latent in enumerate(solution.latents, 1):
        stop = ""
        if latent.stop_probability is not None:
            stop = f"{latent.stop_probability:.2f}  "
        cells = []
        for token, probability in latent.likeliest:
            cells.append(f"{_shorten(token):<{width}} {_round(probability):<5}")
        lines.append(f"{step:6}  {stop}" + "  ".join(cells).rstrip())
        if latent.words is not None:
            words = " / ".join(latent.words.splitlines()) or "nothing"
            lines.append(f"        says  {words}")
    return lines


def _describe_end(solver: Solver, solution: Solution) -> str:
    """Write the length of a thought, and why it ended there."""
    steps = len(solution.latents)
    latent_policy = solver.setup.policy.latent_policy
    if not steps:
        if not solver.setup.checkpoint.description.architecture.has_latents:
            return "in words alone"
        if latent_policy.halts is not None and solver.rule:
            return f"none of at most {solver.rule}, as {ends_at(solver.setup.config)!r} came at once"
        return "none, a fixed number"
    thought = f"{steps} latent{'s' if steps > 1 else ''}"
    if solver.stopping == "length" and steps < solver.rule:
        ends = []
        end = ends_at(solver.setup.config)
        if end:
            ends.append(repr(end))
        if latent_policy.says is not None:
            ends.append("an end token")
        return f"{thought} of at most {solver.rule}, until {' or '.join(ends)} came"
    if solver.stopping == "length":
        return f"{thought}, a fixed number"
    if (solution.latents[-1].stop_probability or 0.0) >= solver.rule:
        return f"{thought}, until the gate's stop probability reached {solver.rule}"
    return (
        f"{thought}, the most; the gate's stop probability stayed below {solver.rule}"
    )


def _round(probability: float) -> str:
    return f"{probability:.2f}" if probability >= 0.01 else f"{probability:.0e}"


def _shorten(token: str) -> str:
    """Shorten a token to at most 9 visible characters."""
    text = repr(token.strip(" ") or token)[1:-1]
    return text if len(text) <= 9 else text[:8] + "…"


def describe_vote(solver: Solver, votes: Vote, seed: int) -> str:
    """Write a vote for a terminal."""
    total = sum(count for _, count in votes.counts)
    noise = f"dropout {solver.setup.policy.config.dropout_rate}"
    name = solver.setup.config.latent_policy.name
    if name != LatentPolicyConfig.name:
        noise += f" and the latent policy {name}"
    lines = [f"vote of {total} rollouts with {noise} (seed {seed})"]
    for answer, count in votes.counts:
        line = f"{count:6}  {answer}"
        if answer is None:
            line = f"{count:6}  no answer"
            if votes.cut:
                line += f" ({votes.cut} truncated)"
        elif answer == votes.majority:
            line += "  <- majority"
        lines.append(line)
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class TrainedReasoner:
    """A reasoner with its own T, rule of stopping, prompt and noise, as `load` returns it.

    A pickle has the checkpoint's place and the arguments of `load`, not the weights: opening it loads them again.

    Attributes:
        solver: models, texts and parameters.
        options: the arguments that `load` was given.
    """

    solver: Solver
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        source = self.source
        if Path(source).exists():
            source = str(Path(source).absolute())
        return _load_pickled, (source, dict(self.options))

    @property
    def params(self) -> Any:
        """The parameters of all its parts, nested dicts of `jax.Array`s: `reasoner`, and `gate` where it has one."""
        return self.solver.params

    @property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """The tokenizer of its texts; `prompts` makes questions into what it reads."""
        return self.solver.setup.template.tokenizer

    @property
    def source(self) -> str:
        """The path or hub id that it was loaded from."""
        return self.solver.setup.config.init

    @property
    def config(self) -> Any:
        """The frozen config that it is used with (`slpo_jax.config.Config`)."""
        return self.solver.setup.config

    def __repr__(self) -> str:
        return f"{self.config.reasoner} from {self.source}, stops by {self.solver.stopping} {self.solver.rule}"

    def prompts(self, questions: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode questions as the reasoner reads them.

        Args:
            questions: B of them.
        Returns:
            tokens int32 [B, P], padded on the left to the longest; and valid bool [B, P], where there is no padding.
        Raises:
            UserError: as `solve`.
        """
        setup = self.solver.setup
        asked = _texts(questions)
        ids = [encode_question(setup, question) for question in asked]
        return pad_prompts(ids, [max(map(len, ids))], setup.template.pad_id)

    def solve_function(self) -> Callable[[Any, Any, Any], dict[str, Any]]:
        """Return `solve` without noise as a pure function of arrays, to use with `jax.jit` and `jax.export`.

        Returns:
            (params, tokens int [B, P], valid bool [B, P]) -> a dict of arrays: `tokens` int [B, A], the answer's, with
            its end token, then padding; `lengths` int [B], of thoughts; `latents` [B, T, D], zeros after (of another
            latent policy its actions, leaves [B, T, ..]); `stop` [B, T], the gate's stop probabilities, which mean
            nothing where a thought has ended. params are `params`, prompts those of `prompts`.
        """
        solver = self.solver
        policy = solver.evaluator.policy.without_noise().with_config(
            stopping=solver.stopping
        )
        rule_type = jnp.float32 if solver.stopping == "threshold" else jnp.int32

        def solve(params: Any, tokens: Any, valid: Any) -> dict[str, Any]:
            rows = tokens.shape[0]
            # Without noise the keys have no effect.
            keys_B = noise.row_keys(jax.random.key(0), jnp.zeros(rows, jnp.int32))
            rule_B = jnp.full(rows, solver.rule, rule_type)
            drawn = sample(policy, params, Prompts(tokens, valid), keys_B, rule_B)
            logits_BT = policy.latent_policy.stop_logits(params, drawn.actions)
            return {
                "tokens": drawn.tokens,
                "lengths": drawn.lengths,
                "latents": drawn.actions,
                "stop": jax.nn.sigmoid(logits_BT),
            }

        return solve

    @overload
    def solve(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self, question: str, samples: int = 0, seed: int = 0
    ) -> Solution: ...
    @overload
    def solve(
        self, question: Sequence[str], samples: int = 0, seed: int = 0
    ) -> list[Solution]: ...
    @by_argument()
    def solve(
        self, question: str | Sequence[str], samples: int = 0, seed: int = 0
    ) -> Solution | list[Solution]:
        """Ask, and watch it think.

        Args:
            question: a question, or several, asked in batches: a list, a tuple, an array or a column of texts.
            samples: rollouts of each question under the noise of the run's evaluation, which vote.
            seed: of that noise.
        Returns:
            a solution, or of several a list of them: answer, text, latents (stop probability, likeliest tokens,
            vector), votes.
        Raises:
            UserError: a question is empty, too long, or has a word that the tokenizer doesn't know.
        """
        questions = _texts(question)
        _check_numbers(samples=samples, seed=seed)
        solutions = []
        for solution in solve_all(self.solver, questions):
            text = describe(self.solver, solution)
            votes = None
            if samples:
                votes = vote(self.solver, solution.question, samples, seed)
                text += "\n\n" + describe_vote(self.solver, votes, seed)
            solutions.append(dataclasses.replace(solution, votes=votes, shown=text))
        return solutions[0] if isinstance(question, str) else solutions

    @by_argument()
    def evaluate(
        self,
        problems: Any,
        samples: int = 16,
        seed: int = 0,
        reward: str | Callable[..., Any] | None = None,
        limit: int = 0,
    ) -> Evaluation:
        """Roll out a whole set: once without noise, and `samples` times with the noise of the run's evaluation.

        Args:
            problems: the name of a set of the run, anything that `config.data.eval` takes (a file, a directory, a hub
                id, a generated set), or records such as {"question": .., "answer": ..}: a list of them or of what
                `read` gives, a table of pandas, polars or pyarrow, a `datasets.Dataset`.
            samples: rollouts of each problem, k of Pass@k; 0 is none.
            seed: of their noise. For a set of the run, the rollouts are those of the run's own evaluation.
            reward: a registered name, or a function of the arguments that it names (`register_reward`) that returns
                the reward of a completion; 1 or more counts as right. None is the run's, the first of several.
            limit: only the first problems; 0 is all.
        Raises:
            UserError: the problems or the reward can't be used.
        """
        _check_numbers(samples=samples, seed=seed, limit=limit)
        setup = self.solver.setup

        # A set of the run has a name, which decides the noise of its rollouts.
        name = ""
        source = os.fspath(problems) if isinstance(problems, os.PathLike) else problems
        if isinstance(source, str) and source in setup.config.data.eval:
            name = source
            source = setup.config.data.eval[name]
        if is_dataset_dict(source):
            logging.warning(
                "problems: of the splits %s, test is asked", ", ".join(source)
            )

        # Read the problems, with the columns that the reward asks for.
        judge = setup.reward if reward is None else setup.reward.asking(reward)
        loaded = load_set(
            setup.config, "problems", source, entries=[*judge.entries.values()]
        )
        loaded.warn()
        if loaded.field_use.unused and not name:
            logging.warning("problems: not used: %s", loaded.field_use.unused)
        setup, encoded = _encode_fitting(setup, loaded[: limit or None], judge)

        # Roll out without noise, then with it.
        solver = self.solver
        run = functools.partial(
            setup.evaluator.run,
            solver.params,
            encoded,
            solver.stopping,
            solver.rule,
            name=name,
        )
        greedy = run(seed=None, samples=1, label="without noise")
        sampled = {}
        if samples:
            sampled[seed] = run(seed=seed, samples=samples, label="with noise")
        rows = list(record_rows(judge, encoded, greedy, sampled, samples))

        milliseconds, batch = setup.evaluator.milliseconds(
            solver.params, encoded, solver.stopping, solver.rule
        )
        # The name of a function isn't enough: two lambdas have the same.
        earns = repr(reward) if callable(reward) else next(iter(judge.entries))
        return Evaluation(rows, Path(self.source).name, earns, milliseconds, batch)

    @by_argument()
    def problems(self, source: str | os.PathLike[str]) -> Problems:
        """Read a set as the run does, with its settings of generated tasks, fields, answers and rewards.

        Args:
            source: the name of a set of the run (those of `config.data.eval`, "train" or "valid"), or anything that
                `config.data.eval` takes.
        Returns:
            the problems that `evaluate(source)` asks; `print` says how they were read.
        Raises:
            UserError: there is no such set, or it can't be read.
        """
        if not isinstance(source, str | os.PathLike):
            raise UserError(
                f"source: {source!r} is not valid; give the name of a set of the run, or a path"
            )

        # Find the set: the run's by its name, else any source.
        config = self.config
        name = os.fspath(source)
        learned = {
            "train": (TRAIN, config.data.train),
            "valid": (VALID, config.data.valid),
        }
        key = "problems"
        place = config.data.eval.get(name, name)
        if name not in config.data.eval and name in learned and not Path(name).exists():
            key, place = learned[name]
        elif place == name and not set(name) & set("/:") and not Path(name).exists():
            known = ", ".join(config.data.eval) or "none"
            raise UserError(
                f"source: {name!r} is not a set of this reasoner (it has {known}); give one of them, a file, an id of "
                "the hub, or a generated set such as chain:test"
            )
        problems = load_set(config, key, place)

        # Say how it was read.
        style = STYLES[self.solver.setup.template.answer_style]
        lines = read_as(name, problems, style.about)
        generation = made_with(place, config.data.of_task(place))
        if generation:
            lines.append(f"  {generation}")
        return problems.with_only(problems, summary=tuple(lines))

    @by_argument()
    def export(
        self,
        folder: str | os.PathLike[str],
        explain: bool = False,
        overwrite: bool = False,
        adapters: bool = False,
    ) -> Path:
        """Write a directory that `transformers` opens, with the code and settings to think as this reasoner does.

        Args:
            folder: must not exist, be empty, or be an export that nobody has changed since; it appears whole or not at
                all.
            explain: with the decoder of SIM-CoT, which must have been kept and, of an external checkpoint, loaded.
            overwrite: also write into a folder in use, but not a run's. Files of other names stay in it.
            adapters: write only the adapters that `config.rl.lora` has trained, as PEFT saves them, into a new folder;
                they are for the model that the stage began from, which adapter_config.json names.
        Raises:
            UserError: the folder is in use, or the reasoner has parts that no other program knows, or no adapters.
        """
        if not isinstance(folder, str | os.PathLike):
            raise UserError(f"folder: {folder!r} is not valid; give a path")
        solver = self.solver
        target = Path(folder).expanduser()
        if adapters:
            self._export_adapters(target)
            return target
        replaces = replaced_by_export(
            target, overwrite, "give another directory, or overwrite=True"
        )

        checkpoint = solver.setup.checkpoint
        config = self._config_as_it_stops()
        description = dataclasses.replace(
            checkpoint.description,
            config=config_to_keep(config, checkpoint.opened),
            rule=solver.rule,
        )
        # Exporting changes the tokenizer, so it gets a copy.
        tokenizer = copy.deepcopy(checkpoint.template.tokenizer)
        template = dataclasses.replace(checkpoint.template, tokenizer=tokenizer)
        exported = Checkpoint(description, template)
        params = jax.device_get(with_decoder(solver.params, explain, self.source))
        write_export(
            target, Path(self.source), params, exported, config, solver.rule, replaces
        )
        return target

    def _export_adapters(self, target: Path) -> None:
        """Copy the stage's adapters, and warn where the reasoner has other trained parts that they lack."""
        check_free(target)
        export_adapters(Path(self.source), target)
        params = self.solver.params
        others = (params.keys() - {REASONER}) | (params[REASONER].keys() - {BACKBONE})
        if self.solver.stopping != "threshold":
            others.discard(GATE)
        if others:
            names = ", ".join(sorted(others)).replace("_", " ")
            logging.warning("%s: holds adapters alone, without the %s", target, names)

        # How a thought ends stands in the export of a whole model, and the base's may end otherwise.
        settings = ending_settings(
            self._config_as_it_stops(), self.solver.setup.checkpoint, self.solver.rule
        )
        if settings:
            told = ", ".join(f"{name}={value}" for name, value in settings.items())
            logging.warning(
                "%s: over an export of its base it thinks as that does; to think as this reasoner, give generate %s",
                target,
                told,
            )

    def _config_as_it_stops(self) -> Config:
        """Return the config of an export, which stops as this reasoner does: the checkpoint may have another rule."""
        is_gated = self.solver.stopping == "threshold"
        return merge_settings(self.solver.setup.config, {"gate.enabled": is_gated})


def _encode_fitting(
    setup: Setup, problems: Sequence[Problem], judge: Reward
) -> tuple[Setup, EncodedProblems]:
    """Encode the problems that the model has positions for, with a setup that has slots for them; warn of others."""
    questions = [problem.question for problem in problems]
    with about("problems"):
        prompts = setup.template.prompts(questions, Counter())

    # Leave out problems that are too long.
    most = setup.most_prompt
    lengths = [len(prompt) for prompt in prompts]
    fit = []
    for problem, length in zip(problems, lengths, strict=True):
        if length <= most:
            fit.append(problem)
    if not fit:
        raise UserError(
            f"problems: the shortest prompt has {min(lengths)} tokens, the model has positions for {most}"
        )
    count = len(problems) - len(fit)
    if count:
        logging.warning("problems: left out %d of %d, of more than %d tokens, the model's positions", count,
                        len(problems), most)  # fmt: skip

    # The longest that fits may need more slots than the run's prompts.
    longest = max(length for length in lengths if length <= most)
    if longest > max(setup.prompt_slots):
        setup = dataclasses.replace(setup, prompt_slots=(*setup.prompt_slots, longest))
    return setup, setup.encode("problems", fit, judge=judge)


def _texts(question: Any) -> list[str]:
    """Return one question or several as a list of them."""
    if isinstance(question, str):
        return [str(question)]
    is_unordered = isinstance(question, Mapping | Set | bytes)
    has_order = isinstance(question, Iterable) and not is_unordered
    questions = list(question) if has_order else []
    if not has_order or not all(isinstance(text, str) for text in questions):
        raise UserError(
            f"question: {question!r} is neither a text nor a list of texts; give one"
        )
    if not questions:
        raise UserError("question: the list is empty; give at least one")
    # An array's texts have a type of its own.
    return [str(text) for text in questions]


def _check_numbers(**numbers: Any) -> None:
    """Refuse all but whole numbers from 0, and seeds from 2^32, of which jax drops bits."""
    for name, value in numbers.items():
        most = 2**32 if name == "seed" else 2**31
        if type(value) is not int or not 0 <= value < most:
            raise UserError(
                f"{name}: {value!r} is not valid; give a whole number from 0 to {most - 1}"
            )


@by_argument()
def load(checkpoint: str | os.PathLike[str], **options: Any) -> TrainedReasoner:
    """Load a reasoner with its models, texts and settings.

    It sets up this process's jax as a run does, if jax has not begun: devices, cache of programs, precision.

    Args:
        checkpoint: the workdir of a run (its newest stage or objective), WORKDIR/checkpoints/STAGE, an export, a
            Hugging Face directory or hub id, or a file.
        threshold: of the gate; None is the one chosen in the run, or 0.5.
        latents: a fixed number instead of the gate; None is the gate's, or the run's.
        max_answer_tokens: None is the run's maximum number of new tokens.
        reasoner: architecture and backbone, such as coconut_gpt2; "" is the checkpoint's own.
        base: the base model's directory or hub id, for a file without config and tokenizer.
        tokenizer: a directory or hub id; "" is the checkpoint's or the base's.
        lora_alpha: scale of LoRA adapters times their rank.
        latent_policy: the law of a thought's steps, such as soft; "" is the run's.
        instruction, answers: the text after a text reasoner's questions, and how its answers are read; "" is the run's.
        speed: that CoLaR is asked to think at, 1 to 5; None is the run's.
        explain: solutions have each latent in words, by the decoder of SIM-CoT, which must have been kept.
    Raises:
        UserError: no such checkpoint, or a setting that it can't be used with.
    """
    if not isinstance(checkpoint, str | os.PathLike):
        raise UserError(
            f"checkpoint: {checkpoint!r} is not valid; give a path or a hub id"
        )
    set_up_jax()
    return TrainedReasoner(load_solver(os.fspath(checkpoint), **options), options)


def _load_pickled(checkpoint: str, options: dict[str, Any]) -> TrainedReasoner:
    """Load the reasoner of a pickle."""
    return load(checkpoint, **options)
