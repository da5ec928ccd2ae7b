"""Asking a trained reasoner a question: what it answers, what can be seen of its thought, how its samples vote."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from slpo_jax.checkpoints.decode_settings import RULE, config_of, made_with, stopping_of, thinking_with
from slpo_jax.checkpoints.decoder import with_decoder
from slpo_jax.checkpoints.detect import identify, newest_checkpoint
from slpo_jax.config.bounds import FieldError
from slpo_jax.config.load_options import KEYS, LoadOptions
from slpo_jax.config.sections import changed
from slpo_jax.data.batches import pad_prompts, padded_chunks
from slpo_jax.data.templates import token_texts
from slpo_jax.errors import UserError
from slpo_jax.evaluation.evaluate import in_words
from slpo_jax.models.parts import LATENT_POLICY
from slpo_jax.policy import noise
from slpo_jax.policy.explain import Reads, reads_of
from slpo_jax.policy.explain import explain as explained
from slpo_jax.policy.policy import Policy, Stopping
from slpo_jax.policy.probe import probe
from slpo_jax.policy.prompted import Prompts
from slpo_jax.policy.rollout import Trajectories, sample
from slpo_jax.rewards.answers import AnswerStyle, in_one_form
from slpo_jax.rewards.reward import Reading
from slpo_jax.run.experiment import Setup, assemble

ROWS = 64  # rollouts at a time
_MOST_LOGITS = 2**28  # 1 GiB
_SET = ("latent_policy", "instruction", "answers", "speed")  # options that are a key of the config each


@dataclasses.dataclass(frozen=True)
class Solver:
    """A trained reasoner, ready to be asked.

    Attributes:
        setup: its models and texts.
        params: all parts.
        stopping: "threshold" or "length".
        rule: the threshold, or the number of latents.
        drawn_latent_policy: the checkpoint lacks the latent policy's own parameters; they are what training would begin
            with.
        reads: how its decoder says thoughts in words; None where that is not asked for.
    """

    setup: Setup
    params: Any
    stopping: Stopping
    rule: float | int
    drawn_latent_policy: bool = False
    reads: Reads | None = None


@dataclasses.dataclass(frozen=True)
class Latent:
    """One step of a thought.

    Attributes:
        stop_probability: rho_t of the gate, None without a trained one.
        nearest: (token's text, probability) of the hidden state that made it, most probable first.
        vector: h_t as it was fed, float32 [D].
        words: what the thought says that ends here, where that was asked for; None within one of several latents.
    """

    stop_probability: float | None
    nearest: list[tuple[str, float]]
    vector: np.ndarray = dataclasses.field(repr=False, compare=False)
    words: str | None = None


@dataclasses.dataclass(frozen=True)
class Vote:
    """Answers of rollouts under the noise of the run's evaluation.

    Attributes:
        counts: (answer, or None for none, its number), commonest first; equal ones are one, as the first is written.
        majority: the commonest answer, the one drawn first on a tie; None if there is no answer.
        cut: how many texts were cut off at the most tokens that an answer may have, which have no answer.
    """

    counts: list[tuple[str | None, int]]
    majority: str | None
    cut: int


@dataclasses.dataclass(frozen=True)
class Solution:
    """What the deterministic rollout thought and wrote; `print` shows it for a terminal.

    Attributes:
        answer: the number in the text as a canonical decimal, or the LaTeX in its box; None if there is none, or the
            text has no end.
        text: without eos.
        latents: h_1 .. h_tau.
        cut: whether the text was cut off at the most tokens that an answer may have.
        votes: of rollouts with noise, where they were asked for.
        shown: all of it, for a terminal.
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


def load_solver(checkpoint: str, **asked: Any) -> Solver:
    """Load a checkpoint with all that belongs to it.

    Args:
        checkpoint: see `slpo_jax.load`.
        **asked: as `LoadOptions` has them.
    Raises:
        UserError: no such checkpoint, or a setting that it can't be used with.
    """
    if unknown := [name for name in asked if name not in KEYS]:
        raise UserError(f"{unknown[0]}: is no argument; give some of {', '.join(KEYS)}")
    try:
        options = LoadOptions(**asked)
    except FieldError as error:
        raise UserError(f"--{error.field}: {error.problem.removesuffix(' or None')}") from None
    identity = identify(newest_checkpoint(checkpoint), options.base, options.lora_alpha)
    config = config_of(identity, options.reasoner, options.tokenizer)
    stopping, rule = stopping_of(config, identity)
    before = {
        "latents": rule if stopping == "length" else f"the threshold {rule}",
        "threshold": rule,
        "max_answer_tokens": config.evaluate.max_answer_tokens or config.max_answer_tokens,
    } | {name: attrgetter(KEYS[name][-1])(config) for name in _SET}
    given = {name: value for name in before if (value := getattr(options, name)) not in (None, "")}
    config = changed(config, {KEYS[name][-1]: given[name] for name in ("max_answer_tokens", *_SET) if name in given})
    if options.latents is not None:
        if options.threshold is not None:
            raise UserError("--threshold: has no use beside --latents; give one of them")
        config = thinking_with(config, {"max_latents": options.latents})
        stopping, rule = "length", options.latents
    elif options.threshold is not None:
        if stopping != "threshold":
            raise UserError(f"--threshold: {checkpoint} has no trained gate; give --latents for a fixed number")
        rule = options.threshold
    if (law := options.latent_policy) and not config.max_latents:
        raise UserError(f"--latents: 0 leaves --latent_policy={law} nothing to think; give e.g. --latents=4")
    setup = assemble(config, identity=identity)
    params = setup.initial_params(draws_latent_policy=bool(law), explain=options.explain)
    made = made_with(identity)
    others = [f"--{name}={now} and not {before[name]!r}" for name, now in given.items() if now != before[name]]
    if others and made:
        logging.warning("%s: not used as it was made, but with %s", identity.source, ", ".join(others))
    if identity.gate_trained and made.get(RULE) is None and not {"latents", "threshold"} & given.keys():
        logging.warning("%s: no threshold was chosen for its gate, so 0.5; --threshold is another", identity.source)
    lacking = LATENT_POLICY in params and LATENT_POLICY not in setup.stored_params(draws_latent_policy=True)
    reads = reads_of(with_decoder(params, options.explain, checkpoint))
    return Solver(setup, params, stopping, rule, lacking, reads)


def solve(solver: Solver, question: str) -> Solution:
    """Ask once, without noise, and watch.

    Raises:
        UserError: the question is empty, too long, or has a word that the tokenizer doesn't know.
    """
    return solve_all(solver, [question])[0]


def solve_all(solver: Solver, questions: Sequence[str]) -> list[Solution]:
    """`solve` for many questions, in batches.

    Raises:
        UserError: as `solve`, before any is asked.
    """
    setup, prompts = solver.setup, [_prompt(solver, question) for question in questions]
    order = np.argsort([len(prompt) for prompt in prompts], kind="stable")
    logits = max(setup.config.max_latents, 1) * setup.reasoner.config.vocab_size  # that are looked at, of one
    found: dict[int, Solution] = {}
    for places, real in padded_chunks(len(prompts), min(len(prompts), ROWS, max(1, _MOST_LOGITS // logits))):
        chosen = order[places]
        batch = _padded(solver, [prompts[place] for place in chosen])
        solutions = _solved(solver, batch, [questions[place] for place in chosen])
        found |= dict(zip(chosen[real].tolist(), solutions, strict=False))  # what fills up comes last
    return [found[place] for place in range(len(prompts))]


def _solved(solver: Solver, prompts: Prompts, questions: list[str]) -> list[Solution]:
    """A batch's solutions."""
    setup, policy = solver.setup, solver.setup.policy
    out = _roll_out(solver, prompts, np.zeros(len(questions), np.int32), 0, noisy=False)
    seen = _probe(policy, solver.reads, solver.params, prompts, out.actions, out.lengths)
    stop_BT, probability_BTK, token_BTK, latents_BTD, *words_BSL = map(np.asarray, seen)
    texts = token_texts(setup.template, setup.reasoner.config.vocab_size)
    solutions = []
    for row, (tokens, length) in enumerate(zip(np.asarray(out.completions), np.asarray(out.lengths), strict=True)):
        latents = []
        for t in range(int(length)):
            pairs = zip(token_BTK[row, t].tolist(), probability_BTK[row, t].tolist(), strict=True)
            stop = float(stop_BT[row, t]) if setup.config.gate.enabled else None
            words = in_words(setup.reward, words_BSL[0][row], t, solver.reads) if solver.reads else None
            latents.append(Latent(stop, [(texts[token], p) for token, p in pairs], latents_BTD[row, t], words))
        reading = setup.reward.read(tokens)
        solutions.append(Solution(questions[row], reading.answer, reading.text, latents, reading.cut))
    return solutions


def vote(solver: Solver, question: str, samples: int, seed: int = 0) -> Vote:
    """Draw noisy rollouts: those that the evaluation draws for the first problem of a set.

    Args:
        samples: N, at least 1.
        seed: dropout seed.
    """
    prompts = _padded(solver, [_prompt(solver, question)])
    readings: list[Reading] = []
    for rows, real in padded_chunks(samples, min(samples, ROWS)):
        many = Prompts(np.repeat(prompts.tokens, len(rows), axis=0), np.repeat(prompts.valid, len(rows), axis=0))
        out = _roll_out(solver, many, rows.astype(np.int32), seed, noisy=True)
        readings += map(solver.setup.reward.read, np.asarray(out.completions)[real])
    return counted(readings, solver.setup.reward.style)


def counted(readings: Sequence[Reading], style: AnswerStyle) -> Vote:
    """The vote of completions that are read."""
    counts = Counter(in_one_form([reading.answer for reading in readings], style)).most_common()
    majority = next((answer for answer, _ in counts if answer is not None), None)
    return Vote(counts, majority, sum(reading.cut for reading in readings))


def _prompt(solver: Solver, question: str) -> list[int]:
    """The question's ids."""
    setup = solver.setup
    if not question.strip():
        raise UserError("question: is empty; ask something")
    try:
        prompt = setup.template.prompt(question)
    except UserError as error:
        raise UserError(f"question: {error}") from None
    most = setup.reasoner.config.n_positions - setup.config.max_latents - setup.evaluator.policy.config.suffix_slots
    if len(prompt) > most:
        raise UserError(f"question: has {len(prompt)} tokens, the model has positions for {most}; shorten it")
    return prompt


def _padded(solver: Solver, prompts: list[list[int]]) -> Prompts:
    """A batch in the smallest bucket that holds it."""
    longest = max(map(len, prompts))
    slots = [slots for slots in solver.setup.prompt_slots if slots >= longest] or [longest]
    return Prompts(*pad_prompts(prompts, slots, range(len(prompts)), solver.setup.template.pad_id))


def _roll_out(solver: Solver, prompts: Prompts, sample_N: np.ndarray, seed: int, noisy: bool) -> Trajectories:
    setup = solver.setup
    policy = setup.evaluator.policy if noisy else setup.evaluator.policy.without_noise()
    policy = policy.having(stopping=solver.stopping)
    key = noise.stream_key(setup.key, "evaluate", seed)
    rule_N = np.full(len(sample_N), solver.rule, np.float32 if solver.stopping == "threshold" else np.int32)
    return _sample(policy, solver.params, prompts, key, sample_N, rule_N)


@functools.partial(jax.jit, static_argnums=0)
def _sample(policy: Policy, params, prompts: Prompts, key, sample_N, rule_N) -> Trajectories:
    keys_N = noise.row_keys(key, jnp.zeros_like(sample_N), sample_N)
    return sample(policy, params, prompts, keys_N, rule_N)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _probe(policy: Policy, reads: Reads | None, params, prompts: Prompts, actions, lengths_B):
    """What `probe` sees of a batch, its latents, float32 [B, T, D], and what they say, if that was asked for."""
    fed_BTD = policy.latent_policy.feed(params, actions)
    said = [explained(policy, params, fed_BTD, reads)] if reads else []
    return *probe(policy, params, prompts, actions, lengths_B), fed_BTD.astype(jnp.float32), *said
