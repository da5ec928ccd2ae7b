"""A trained reasoner in Python: ask it, evaluate it, export it."""

import copy
import dataclasses
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
from slpo_jax.api.solver import Solution, Solver, Vote, encode_question, load_solver, solve_all, vote
from slpo_jax.checkpoints.checkpoint import Checkpoint
from slpo_jax.checkpoints.export import export_adapters, replaced_by_export, write_export
from slpo_jax.checkpoints.foreign_layouts import with_decoder
from slpo_jax.checkpoints.saved_config import config_to_keep
from slpo_jax.config.config import ends_at
from slpo_jax.config.overrides import changed
from slpo_jax.data.batches import EncodedProblems, pad_prompts
from slpo_jax.data.problem import Problem, Problems
from slpo_jax.data.record_readers import is_dataset_dict
from slpo_jax.errors import UserError, about
from slpo_jax.evaluation.completions import Completions, record_rows
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
    indent, style = "\n" + " " * 10, STYLES[solver.setup.template.answer_style]
    none = f"none: the text has {'no end, so what it says last may be truncated' if solution.cut else style.none}"
    lines = [
        f"from      {solver.setup.config.init}",
        f"question  {indent.join(solution.question.strip().splitlines())}",
        f"answer    {none if solution.answer is None else solution.answer}",
        f"text      {indent.join(solution.text.strip().splitlines()) or 'nothing'}",
        f"thought   {_ending(solver, solution)}",
    ]
    if solution.cut:
        most = solver.setup.evaluator.policy.config.answer_slots
        lines.insert(4, f"truncated at {most} tokens, before it ended; --max_answer_tokens={2 * most} lets it go on")
    if not solution.latents:
        return "\n".join(lines)
    lines.append("")
    gated = solver.setup.config.gate.enabled
    lines.append(f"latent  {'stop  ' if gated else ''}nearest tokens of the hidden state that made it, and probability")
    cells = [[(_short(token), p) for token, p in latent.nearest] for latent in solution.latents]
    width = max((len(token) for row in cells for token, _ in row), default=0)
    for step, (latent, row) in enumerate(zip(solution.latents, cells, strict=True), 1):
        stop = "" if latent.stop_probability is None else f"{latent.stop_probability:.2f}  "
        lines.append(f"{step:6}  {stop}" + "  ".join(f"{token:<{width}} {_rounded(p):<5}" for token, p in row).rstrip())
        if latent.words is not None:
            lines.append(f"        says  {' / '.join(latent.words.splitlines()) or 'nothing'}")
    return "\n".join(lines)


def _ending(solver: Solver, solution: Solution) -> str:
    steps, latent_policy = len(solution.latents), solver.setup.policy.latent_policy
    if not steps:
        if not solver.setup.checkpoint.description.architecture.has_latents:
            return "in words alone"
        if latent_policy.halts is not None and solver.rule:
            return f"none of at most {solver.rule}, as {ends_at(solver.setup.config)!r} came at once"
        return "none, a fixed number"
    thought = f"{steps} latent{'s' if steps > 1 else ''}"
    if solver.stopping == "length" and steps < solver.rule:
        end = ends_at(solver.setup.config)
        ends = [repr(end)] * bool(end) + ["an end token"] * (latent_policy.says is not None)
        return f"{thought} of at most {solver.rule}, until {' or '.join(ends)} came"
    if solver.stopping == "length":
        return f"{thought}, a fixed number"
    if (solution.latents[-1].stop_probability or 0.0) >= solver.rule:
        return f"{thought}, until the gate's stop probability reached {solver.rule}"
    return f"{thought}, the most; the gate's stop probability stayed below {solver.rule}"


def _rounded(probability: float) -> str:
    return f"{probability:.2f}" if probability >= 0.01 else f"{probability:.0e}"


def _short(token: str) -> str:
    """Shorten a token to at most 9 visible characters."""
    text = repr(token.strip(" ") or token)[1:-1]
    return text if len(text) <= 9 else text[:8] + "…"


def describe_vote(solver: Solver, votes: Vote, seed: int) -> str:
    """Write a vote for a terminal."""
    total = sum(count for _, count in votes.counts)
    noise = f"dropout {solver.setup.policy.config.dropout_rate}"
    if (name := solver.setup.config.latent_policy.name) != LatentPolicyConfig.name:
        noise += f" and the latent policy {name}"
    lines = [f"vote of {total} rollouts with {noise} (seed {seed})"]
    for answer, count in votes.counts:
        mark = "  <- majority" if answer is not None and answer == votes.majority else ""
        cut = f" ({votes.cut} truncated)" if answer is None and votes.cut else ""
        lines.append(f"{count:6}  {'no answer' if answer is None else answer}{cut}{mark}")
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class TrainedReasoner:
    """A reasoner with its own T, way of stopping, threshold, prompt and noise, as `load` returns it.

    A pickle of it has the checkpoint's place and the arguments of `load`, not the weights: whoever opens it loads them.

    Attributes:
        solver: models, texts and parameters.
        options: the arguments of `load` that it was loaded with.
    """

    solver: Solver
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        source = Path(self.source)
        return _loaded, (str(source.absolute()) if source.exists() else self.source, dict(self.options))

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
        setup, asked = self.solver.setup, _texts(questions)
        ids = [encode_question(setup, question) for question in asked]
        return pad_prompts(ids, [max(map(len, ids))], setup.template.pad_id)

    def solve_function(self) -> Callable[[Any, Any, Any], dict[str, Any]]:
        """Return `solve` without noise as a pure function of arrays, for `jax.jit` and `jax.export` of one's own.

        Returns:
            (params, tokens int [B, P], valid bool [B, P]) -> a dict of arrays: `tokens` int [B, A], the answer's, with
            what ends it, then padding; `lengths` int [B], of thoughts; `latents` [B, T, D], zeros after (of another
            latent policy its actions, leaves [B, T, ..]); `stop` [B, T], the gate's stop probabilities, which mean
            nothing where a thought has ended. params are `params`, prompts those of `prompts`.
        """
        solver = self.solver
        policy = solver.evaluator.policy.without_noise().having(stopping=solver.stopping)
        rule_type = jnp.float32 if solver.stopping == "threshold" else jnp.int32

        def solve(params: Any, tokens: Any, valid: Any) -> dict[str, Any]:
            rows = tokens.shape[0]
            keys_B = noise.row_keys(jax.random.key(0), jnp.zeros(rows, jnp.int32))
            drawn = sample(policy, params, Prompts(tokens, valid), keys_B, jnp.full(rows, solver.rule, rule_type))
            stop_BT = jax.nn.sigmoid(policy.latent_policy.stop_logits(params, drawn.actions))
            return {"tokens": drawn.tokens, "lengths": drawn.lengths, "latents": drawn.actions, "stop": stop_BT}

        return solve

    @overload
    def solve(self, question: str, samples: int = 0, seed: int = 0) -> Solution: ...
    @overload
    def solve(self, question: Sequence[str], samples: int = 0, seed: int = 0) -> list[Solution]: ...
    @by_argument()
    def solve(self, question: str | Sequence[str], samples: int = 0, seed: int = 0) -> Solution | list[Solution]:
        """Ask, and watch it think.

        Args:
            question: a question, or several, asked in batches: a list, a tuple, an array or a column of texts.
            samples: rollouts of each question under the noise of the run's evaluation, which vote.
            seed: of that noise.
        Returns:
            a solution, or of several a list of them: answer, text, latents (stop probability, nearest tokens, vector),
            votes.
        Raises:
            UserError: a question is empty, too long, or has a word that the tokenizer doesn't know.
        """
        questions = _texts(question)
        _check_numbers(samples=samples, seed=seed)
        solutions = []
        for solution in solve_all(self.solver, questions):
            text, votes = describe(self.solver, solution), None
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
            reward: a registered name, or a function of what it names (`register_reward`) that says what a completion
                earns; 1 or more counts as right. None is the run's, the first of several.
            limit: only the first problems; 0 is all.
        Raises:
            UserError: the problems or the reward can't be used.
        """
        _check_numbers(samples=samples, seed=seed, limit=limit)
        setup = self.solver.setup
        name = ""
        source = os.fspath(problems) if isinstance(problems, os.PathLike) else problems
        if isinstance(source, str) and source in setup.config.data.eval:
            name = source
            source = setup.config.data.eval[name]
        if is_dataset_dict(source):
            logging.warning("problems: of the splits %s, test is asked", ", ".join(source))
        judge = setup.reward if reward is None else setup.reward.asking(reward)
        loaded = load_set(setup.config, "problems", source, entries=[*judge.entries.values()])
        loaded.warn()
        if loaded.field_use.unused and not name:
            logging.warning("problems: not used: %s", loaded.field_use.unused)
        setup, encoded = _fitting(setup, loaded[: limit or None], judge)
        stopping, rule = self.solver.stopping, self.solver.rule

        def run(seed: int | None, samples: int, label: str) -> Completions:
            return setup.evaluator.run(
                self.solver.params, encoded, stopping, rule, seed=seed, samples=samples, label=label, name=name
            )

        greedy = run(None, 1, "without noise")
        sampled = {seed: run(seed, samples, "with noise")} if samples else {}
        rows = list(record_rows(judge, encoded, greedy, sampled, samples))
        earns = repr(reward) if callable(reward) else next(iter(judge.entries))  # two lambdas differ
        milliseconds, batch = setup.evaluator.milliseconds(self.solver.params, encoded, stopping, rule)
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
            raise UserError(f"source: {source!r} is not valid; give the name of a set of the run, or a path")
        config = self.config
        name = os.fspath(source)
        learned = {"train": (TRAIN, config.data.train), "valid": (VALID, config.data.valid)}
        if name in config.data.eval:
            key = "problems"
            place = config.data.eval[name]
        elif name in learned and not Path(name).exists():
            key, place = learned[name]
        else:
            key = "problems"
            place = name
        problems = load_set(config, key, place)
        lines = read_as(name, problems, STYLES[self.solver.setup.template.answer_style].about)
        if line := made_with(place, config.data.of_task(place)):
            lines.append(f"  {line}")
        return problems.with_only(problems, summary=tuple(lines))

    @by_argument()
    def export(
        self, folder: str | os.PathLike[str], explain: bool = False, overwrite: bool = False, adapters: bool = False
    ) -> Path:
        """Write a directory that `transformers` opens, with all that it needs to think as this does.

        Args:
            folder: must not exist, be empty, or be an export that nobody has changed since; it appears whole or not at
                all.
            explain: with the decoder of SIM-CoT, which must have been kept and, of a foreign checkpoint, loaded.
            overwrite: another folder too, but a run's. Files of other names stay in it.
            adapters: instead of all, what `config.rl.lora` has trained, as PEFT saves it, into a new folder; for the
                model that the stage began from, which adapter_config.json names.
        Raises:
            UserError: the folder is in use, or the reasoner has parts that no other program knows, or no adapters.
        """
        if not isinstance(folder, str | os.PathLike):
            raise UserError(f"folder: {folder!r} is not valid; give a path")
        solver, target = self.solver, Path(folder).expanduser()
        if adapters:
            check_free(target)
            export_adapters(Path(self.source), target)
            unused = {REASONER} if solver.stopping == "threshold" else {REASONER, GATE}
            others = (solver.params.keys() - unused) | (solver.params[REASONER].keys() - {BACKBONE})
            if others:
                names = ", ".join(sorted(others)).replace("_", " ")
                logging.warning("%s: holds adapters alone, without the %s", target, names)
            return target
        replaces = replaced_by_export(target, overwrite, "give another directory, or overwrite=True")
        checkpoint = solver.setup.checkpoint
        config = changed(solver.setup.config, {"gate.enabled": solver.stopping == "threshold"})
        template = dataclasses.replace(checkpoint.template, tokenizer=copy.deepcopy(checkpoint.template.tokenizer))
        kept = config_to_keep(config, checkpoint.opened)
        description = dataclasses.replace(checkpoint.description, config=kept, rule=solver.rule)
        params = jax.device_get(with_decoder(solver.params, explain, self.source))
        exported = Checkpoint(description, template)
        write_export(target, Path(self.source), params, exported, config, solver.rule, replaces)
        return target


def _fitting(setup: Setup, problems: Sequence[Problem], judge: Reward) -> tuple[Setup, EncodedProblems]:
    """Return a setup with room for the problems that the model has positions for, and these; count others in a line."""
    with about("problems"):
        lengths = list(map(len, setup.template.prompts([problem.question for problem in problems], Counter())))
    most = setup.most_prompt
    fit = [problem for problem, length in zip(problems, lengths, strict=True) if length <= most]
    if not fit:
        raise UserError(f"problems: the shortest prompt has {min(lengths)} tokens, the model has positions for {most}")
    if len(fit) < len(problems):
        count = len(problems) - len(fit)
        logging.warning("problems: left out %d of %d, of more than %d tokens, the model's positions", count,
                        len(problems), most)  # fmt: skip
    longest = max(length for length in lengths if length <= most)
    if longest > max(setup.prompt_slots):
        setup = dataclasses.replace(setup, prompt_slots=(*setup.prompt_slots, longest))
    return setup, setup.encode("problems", fit, judge=judge)


def _texts(question: Any) -> list[str]:
    """Return one question or several as a list of them."""
    questions = [question] if isinstance(question, str) else question
    has_order = isinstance(questions, Iterable) and not isinstance(questions, Mapping | Set | bytes)
    questions = list(questions) if has_order else [None]
    if not all(isinstance(text, str) for text in questions):
        raise UserError(f"question: {question!r} is neither a text nor a list of texts; give one")
    if not questions:
        raise UserError("question: the list is empty; give at least one")
    return [str(text) for text in questions]  # an array's are of a type of its own


def _check_numbers(**numbers: Any) -> None:
    """Refuse all but whole numbers from 0; a seed below 2^32, beyond which jax leaves bits out."""
    for name, value in numbers.items():
        most = 2**32 if name == "seed" else 2**31
        if type(value) is not int or not 0 <= value < most:
            raise UserError(f"{name}: {value!r} is not valid; give a whole number from 0 to {most - 1}")


@by_argument()
def load(checkpoint: str | os.PathLike[str], **options: Any) -> TrainedReasoner:
    """Load a reasoner with all that belongs to it.

    It sets this process's jax up as a run does, where jax has not begun: devices, cache of programs, precision.

    Args:
        checkpoint: the workdir of a run (its newest stage or objective), WORKDIR/checkpoints/STAGE, an export, a
            Hugging Face directory or hub id, or a file.
        threshold: of the gate; None is the one chosen in the run, or 0.5.
        latents: a fixed number instead of the gate; None is the gate's, or the run's.
        max_answer_tokens: None is the run's maximum of new tokens.
        reasoner: architecture and backbone, such as coconut_gpt2; "" is what the checkpoint itself says.
        base: the base model's directory or hub id, for a file without config and tokenizer.
        tokenizer: a directory or hub id; "" is the checkpoint's or the base's.
        lora_alpha: scale of LoRA adapters times their rank.
        latent_policy: the law of a thought's steps, such as soft; "" is the run's.
        instruction, answers: what a text reasoner is asked with, and how its answer is read; "" is the run's.
        speed: that CoLaR is asked to think at, 1 to 5; None is the run's.
        explain: solutions have each latent in words, by the decoder of SIM-CoT, which must have been kept.
    Raises:
        UserError: no such checkpoint, or a setting that it can't be used with.
    """
    if not isinstance(checkpoint, str | os.PathLike):
        raise UserError(f"checkpoint: {checkpoint!r} is not valid; give a path or a hub id")
    set_up_jax()
    return TrainedReasoner(load_solver(os.fspath(checkpoint), **options), options)


def _loaded(checkpoint: str, options: dict[str, Any]) -> TrainedReasoner:
    """Open a pickle's reasoner."""
    return load(checkpoint, **options)
