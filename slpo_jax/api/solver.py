"""Ask a trained reasoner a question: its answer, its visible thought, and the vote of its samples."""

import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from absl import logging

from slpo_jax.api.load_options import KEYS, LoadOptions
from slpo_jax.architectures import architecture_of
from slpo_jax.checkpoints.external_layouts import with_decoder
from slpo_jax.checkpoints.identity import Identity, identify
from slpo_jax.checkpoints.saved_config import (
    UNCHOSEN,
    config_of,
    stated_settings,
    stopping_of,
    with_overrides,
)
from slpo_jax.config.config import Config
from slpo_jax.data.batches import EncodedProblems
from slpo_jax.data.problem import Problem, Problems
from slpo_jax.data.templates import token_texts
from slpo_jax.errors import UserError, about, key_name
from slpo_jax.evaluation.completions import Completions, in_words
from slpo_jax.evaluation.evaluator import Evaluator
from slpo_jax.models.parts import DECODER
from slpo_jax.policy.explain import Reads, reads_of
from slpo_jax.policy.policy import Stopping
from slpo_jax.rewards.answers import AnswerStyle, in_one_form
from slpo_jax.rewards.reward import Reading
from slpo_jax.run.setup import Setup, assemble
from slpo_jax.settings import FieldError

ROWS = 64  # rollouts at a time
_MORE = 64  # slots of a bucket more than of the one before it, beyond the config's
_MOST_LOGITS = 2**28  # 1 GiB
# Options that are a key of the config each.
_SET = ("latent_policy", "instruction", "answers", "speed")


@dataclasses.dataclass(frozen=True)
class Solver:
    """A trained reasoner, ready to be asked.

    Attributes:
        setup: its models and texts.
        params: all parts.
        stopping: "threshold" or "length".
        rule: the threshold, or the number of latents.
        reads: the way in which its decoder reads thoughts; None where nobody asked for words.
    """

    setup: Setup
    params: Any
    stopping: Stopping
    rule: float | int
    reads: Reads | None = None

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """The setup's evaluator without its scorers, and with buckets for all that the model has positions for."""
        setup = self.setup
        most = max(setup.prompt_slots)
        slots = {*setup.prompt_slots, *range(most, setup.most_prompt, _MORE)}
        slots.add(max(most, setup.most_prompt))
        policy = setup.evaluator.policy
        return Evaluator(policy, setup.mesh, ROWS, sorted(slots), setup.key)


@dataclasses.dataclass(frozen=True)
class Latent:
    """A step of a thought.

    Attributes:
        stop_probability: rho_t of the gate, None without a trained one.
        likeliest: (token's text, probability) of the hidden state that made it, most probable first.
        vector: h_t as it was fed, float32 [D].
        words: the words of the thought that ends here, if they were asked for; None within one of several latents.
    """

    stop_probability: float | None
    likeliest: list[tuple[str, float]]
    vector: np.ndarray = dataclasses.field(repr=False, compare=False)
    words: str | None = None


@dataclasses.dataclass(frozen=True)
class Vote:
    """The answers of rollouts under the noise of the run's evaluation.

    Attributes:
        counts: (answer or None, number), commonest first; equal answers count as one, as the first is written.
        majority: the commonest answer, the one drawn first on a tie; None without any answer.
        cut: the number of texts that were cut off at the most tokens of an answer, and so have no answer.
    """

    counts: list[tuple[str | None, int]]
    majority: str | None
    cut: int


@dataclasses.dataclass(frozen=True)
class Solution:
    """The thought and the text of the deterministic rollout; `print` shows it for a terminal.

    Attributes:
        answer: the number in the text as a canonical decimal, or the LaTeX in its box; None without one, or if the
            text has no end.
        text: without eos.
        latents: h_1 .. h_tau.
        cut: whether the text was cut off at the most tokens of an answer.
        votes: the vote of rollouts with noise, if it was asked for.
        shown: the solution as a text for a terminal.
    """

    question: str
    answer: str | None
    text: str
    latents: list[Latent]
    cut: bool
    votes: Vote | None = None
    shown: str = dataclasses.field(default="", repr=False, compare=False)

    def __str__(self) -> str:
        return self.shown


def load_solver(checkpoint: str, **arguments: Any) -> Solver:
    """Load a checkpoint with all that belongs to it.

    Args:
        checkpoint: see `slpo_jax.load`.
        **arguments: as `LoadOptions` has them.
    Raises:
        UserError: no such checkpoint, or a setting that it can't be used with.
    """
    unknown = [name for name in arguments if name not in KEYS]
    if unknown:
        raise UserError(f"{unknown[0]}: is no argument; give some of {', '.join(KEYS)}")
    try:
        options = LoadOptions(**arguments)
    except FieldError as error:
        raise UserError(f"--{error.field}", error.problem) from None

    # Read the checkpoint's own config and its rule of stopping.
    identity = identify(checkpoint, options.base, options.lora_alpha)
    own = config_of(identity, options.reasoner, options.tokenizer)
    stopping, chosen = stopping_of(own, identity)
    own_rule = UNCHOSEN if chosen is None else chosen

    # Lay the given options over them.
    given = {}
    overrides = {}
    for name, value in vars(options).items():
        if value in (None, ""):
            continue
        given[name] = value
        if KEYS[name]:
            overrides[KEYS[name][-1]] = value
    config = with_overrides(own, overrides)
    rule = own_rule
    if options.latents is not None:
        stopping = "length"
        rule = options.latents
    elif options.threshold is not None:
        rule = options.threshold
    _check_options(options, identity, own, config)

    # Build models and texts, then read parameters.
    setup = assemble(config, identity=identity)
    params = setup.initial_params(options.explain)

    # Say where it is not used as it was made.
    if stated_settings(identity, own):
        _say_given(identity, given, own, own_rule)
    if chosen is None and not {"latents", "threshold"} & given.keys():
        logging.warning(
            "%s: no threshold was chosen for its gate, so 0.5; --threshold is another",
            identity.source,
        )
    reads = None
    if options.explain or DECODER in params:
        reads = reads_of(with_decoder(params, True, checkpoint))
    return Solver(setup, params, stopping, rule, reads)


def _check_options(
    options: LoadOptions, identity: Identity, own: Config, config: Config
) -> None:
    """Refuse options that don't fit a checkpoint, or that would change nothing.

    Args:
        own: the checkpoint's config.
        config: the same with the options.
    """
    if options.threshold is not None and options.latents is not None:
        raise UserError(
            "--threshold",
            f"has no use beside {key_name('--latents')}; give one of them",
        )
    if options.threshold is not None and not own.gate.enabled:
        raise UserError(
            "--threshold",
            f"{identity.source} has no trained gate; give {key_name('--latents')} for a fixed number",
        )
    if options.latent_policy and not config.max_latents:
        raise UserError(
            "--latents",
            f"0 leaves {key_name('--latent_policy')}={options.latent_policy} nothing to think; give e.g. "
            f"{key_name('--latents')}=4",
        )
    uses = {
        "base": identity.base,
        "lora_alpha": identity.lora_alpha,
        "speed": "speed" in architecture_of(config.reasoner).prompt_keys,
    }
    for name, has_use in uses.items():
        if getattr(options, name) and not has_use:
            raise UserError(
                f"--{name}", f"changes nothing of {identity.source}; leave it out"
            )


def _say_given(
    identity: Identity, given: Mapping[str, Any], own: Config, rule: float | int
) -> None:
    """Say which options differ from what a checkpoint was made with.

    Args:
        given: options by name.
        own: the checkpoint's config.
        rule: its threshold or number of latents.
    """
    made = {
        "latents": f"the threshold {rule}" if own.gate.enabled else rule,
        "threshold": rule,
        "max_answer_tokens": own.evaluate.max_answer_tokens or own.max_answer_tokens,
    }
    made |= {name: attrgetter(KEYS[name][-1])(own) for name in _SET}
    texts = []
    for name, value in made.items():
        if name in given and given[name] != value:
            texts.append(f"--{name}={given[name]} and not {value!r}")
    if texts:
        line = "%s: not used as it was made, but with %s"
        logging.warning(line, identity.source, ", ".join(texts))


def solve(solver: Solver, question: str) -> Solution:
    """Ask once, without noise, and watch.

    Raises:
        UserError: the question is empty, too long, or has a word that the tokenizer doesn't know.
    """
    return solve_all(solver, [question])[0]


def solve_all(solver: Solver, questions: Sequence[str]) -> list[Solution]:
    """Ask many questions as `solve` does, in batches.

    Raises:
        UserError: as `solve`, before any is asked.
    """
    # The likeliest tokens need the logits of all latents, which bound the rows of a batch.
    setup = solver.setup
    vocab_size = setup.reasoner.config.vocab_size
    logits = max(setup.config.max_latents, 1) * vocab_size
    rows = min(len(questions), ROWS, max(1, _MOST_LOGITS // logits))
    completions = _roll_out(
        solver, questions, rows, keep_latents=True, probed=True, label="solve"
    )

    # Describe each latent, then read the answer.
    texts = token_texts(setup.template, vocab_size)
    solutions = []
    for row, question in enumerate(questions):
        latents = []
        for t in range(completions["latent_steps"][row]):
            tokens = [texts[token] for token in completions["likeliest_token"][row, t]]
            probabilities = completions["likeliest_probability"][row, t].tolist()
            likeliest = list(zip(tokens, probabilities, strict=True))
            vector = completions["latents"][row, t]
            stop = None
            if setup.config.gate.enabled:
                stop = float(completions["stop"][row, t])
            words = None
            if solver.reads:
                decoded = completions["words"][row]
                words = in_words(setup.reward, decoded, t, solver.reads)
            latents.append(Latent(stop, likeliest, vector, words))
        reading = setup.reward.read(completions["tokens"][row])
        solutions.append(
            Solution(question, reading.answer, reading.text, latents, reading.cut)
        )
    return solutions


def vote(solver: Solver, question: str, samples: int, seed: int = 0) -> Vote:
    """Draw noisy rollouts: those that the evaluation draws for the first problem of a set.

    Args:
        samples: N, at least 1.
        seed: dropout seed.
    """
    rows = min(samples, ROWS)
    drawn = _roll_out(
        solver, [question], rows, seed=seed, samples=samples, label="vote"
    )
    reward = solver.setup.reward
    readings = [reward.read(tokens) for tokens in drawn["tokens"]]
    return count_votes(readings, reward.style)


def count_votes(readings: Sequence[Reading], style: AnswerStyle) -> Vote:
    """Count the votes of completions."""
    answers = in_one_form([reading.answer for reading in readings], style)
    counts = Counter(answers).most_common()
    majority = next((answer for answer, _ in counts if answer is not None), None)
    return Vote(counts, majority, sum(reading.cut for reading in readings))


def _roll_out(
    solver: Solver, questions: Sequence[str], rows: int, **options: Any
) -> Completions:
    """Roll out questions in batches of so many rows."""
    setup = solver.setup
    prompts = [encode_question(setup, question) for question in questions]
    problems = Problems(Problem(question, (), "") for question in questions)
    empty = [list[Any]() for _ in questions]
    encoded = EncodedProblems(problems, prompts, empty, empty, setup.template)

    # The copy shares the cached programs, which don't depend on the size of a batch.
    evaluator = copy.copy(solver.evaluator)
    evaluator.batch_size = -(-rows // setup.mesh.size) * setup.mesh.size

    # The decoder is left out unless it is to read the thoughts.
    params = with_decoder(solver.params, solver.reads is not None, setup.config.init)
    return evaluator.run(params, encoded, solver.stopping, solver.rule, **options)


def encode_question(setup: Setup, question: str) -> list[int]:
    """Return a question's ids.

    Raises:
        UserError: it is empty, too long, or has a word that the tokenizer doesn't know.
    """
    if not question.strip():
        raise UserError("question: is empty; ask something")
    # A line break at its end is the file's or the shell's that it comes from; data sets keep theirs.
    asked = question.rstrip("\r\n")
    with about("question"):
        prompt = setup.template.prompt(asked)
    if len(prompt) > setup.most_prompt:
        raise UserError(
            f"question: has {len(prompt)} tokens, the model has positions for {setup.most_prompt}; shorten it"
        )
    return prompt
