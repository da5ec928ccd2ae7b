"""Whether what a config asks for can be done with what it starts from."""

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from absl import logging

from slpo_jax.architectures import IN_WORDS, REASONERS
from slpo_jax.checkpoints.checkpoint import Checkpoint
from slpo_jax.config.config import Config
from slpo_jax.data.batches import EncodedProblems
from slpo_jax.data.chat import PromptConfig
from slpo_jax.data.templates import Ids, listed
from slpo_jax.errors import UserError, key_name
from slpo_jax.rewards.functions import GIVEN, names_of
from slpo_jax.rewards.reward import Reading, Reward
from slpo_jax.run.sources import LEARNED
from slpo_jax.runtime import hosts
from slpo_jax.stages import EVALUATE, IMITATE

_TRIED = 8  # problems that a reward is tried on before any work
_OURS = {"solution_str": "completion", "response": "completion", "ground_truth": "answer"}  # by what verl calls them


def check_start(config: Config, checkpoint: Checkpoint, finished: Collection[str]) -> None:
    """Refuse a start that lacks what is not trained but asked for, and thoughts that are made of nothing.

    Args:
        finished: names of the stages that the workdir holds.
    """
    architecture = checkpoint.description.architecture
    prompt = config.prompt
    name, reasoner = config.latent_policy.name, config.reasoner
    config.latent_policy.selected.check(name, architecture, reasoner, config.max_latents, prompt.closing)
    recipe, thinks = config.imitate.recipe or architecture.default_recipe, config.max_latents > 0
    if IMITATE in config.stages and recipe in architecture.not_taught_by and (thinks or not architecture.has_latents):
        raise UserError(
            f"config.imitate.recipe: {recipe} doesn't teach {config.reasoner} to think; leave it out for its own, "
            f"{architecture.default_recipe}"
        )
    default = PromptConfig(answers=prompt.answers if prompt.marked_style("after_mark") == prompt.answers else "auto")
    for key in [key for key, value in vars(default).items() if getattr(prompt, key) != value]:
        if key not in architecture.prompt_keys:
            others = ", ".join(name for name, (kind, _) in REASONERS.items() if key in kind.prompt_keys)
            raise UserError(
                f"config.prompt.{key}", f"{reasoner} asks and answers in its own way; leave it out, or use {others}"
            )
    if not architecture.has_gate and config.gate.enabled:
        raise UserError(f"config.gate.enabled: True, but a {architecture.name} reasoner has no gate; set it to False")
    if checkpoint.lacks and IMITATE not in {*config.stages, *finished}:
        raise UserError(
            f"{key_name('config.init')}: {config.init} is a base model and no {config.reasoner} yet (it lacks the "
            f"{checkpoint.lacks}); put imitate into config.stages, give a reasoner's checkpoint, or ask it in "
            f"words with {key_name('config.reasoner')}={IN_WORDS}"
        )
    trains = set(config.stages) != {EVALUATE} or bool(finished)
    if config.gate.enabled and config.init and not checkpoint.description.gate_trained and not trains:
        raise UserError(
            f"config.gate.enabled: {config.init} comes without a trained stopping gate; set it to False for a fixed "
            "number of latents, or train a gate with the cold_start stage"
        )


def fitting_slots(slots: Collection[int], latents: int, answers: int, positions: int, init: str) -> tuple[int, ...]:
    """Return the buckets, cut to what the model's positions leave for prompts.

    Args:
        latents, answers: the most that there may be of each.
        init: whose positions they are; "" of random weights, which all buckets must fit.
    """
    others, prompt = latents + answers, max(slots)
    if others >= positions and init:
        key = "max_latents" if latents else "max_answer_tokens"
        raise UserError(
            f"{key_name(f'config.{key}')}: {latents} latents and {answers} answer tokens leave a prompt none of the "
            f"{positions} positions of {init}; lower "
            f"{key_name('config.max_latents')} or {key_name('config.max_answer_tokens')}"
        )
    if not init and prompt + others > positions:
        raise UserError(
            f"config.model.n_positions: {positions} is less than the {prompt + others} slots of prompt ({prompt}), "
            f"latents ({latents}) and answer ({answers}) together; "
            "raise it, or lower config.prompt_slots, config.max_latents or config.max_answer_tokens"
        )
    return tuple(sorted({min(size, positions - others) for size in slots}))


def check_batch(config: Config, section: str, devices: int) -> None:
    """Refuse a stage's batch without equal parts for all devices and micro-batches."""
    settings = getattr(config, section)
    if settings.batch_size % (devices * settings.micro_batches):
        raise UserError(
            f"config.{section}.batch_size: {settings.batch_size} is not a multiple of {devices} devices x "
            f"{settings.micro_batches} micro-batches; change one of them"
        )


def earnable(problems: EncodedProblems, where: str, judge: Reward) -> EncodedProblems:
    """Keep the problems whose reference earns what it should, in the text in which it is taught; count others.

    Those with words that the tokenizer doesn't know stay: they count as wrong, as `say_unknown` says.

    Raises:
        UserError: there is none.
    """
    unknown = problems.template.tokenizer.unk_token_id
    places = [i for i in judge.unearned(problems.answers, problems.problems) if unknown not in problems.answers[i]]
    if not places:
        return problems
    text = problems.template.answer_text(problems.problems[places[0]].answer)
    answer = judge.read(np.array([*problems.answers[places[0]], problems.template.eos_id], np.int32)).answer
    problem = f"{text!r} is read as {answer!r}" if answer else f"{text!r} has no answer when it is read"
    if len(places) == len(problems):
        raise UserError(f"{where}: {problem}, and no answer of the {len(places)} is right itself; "
                        f"{key_name('config.prompt.answers')} says how answers are read")  # fmt: skip
    if hosts.is_first():
        logging.warning("%s: left out %d of %d problems, whose own answers would be wrong: %s", where, len(places),
                        len(problems), problem)  # fmt: skip
    rest = problems.subset(np.setdiff1d(np.arange(len(problems)), places))
    left_out = problems.problems.left_out + len(places)
    return dataclasses.replace(rest, problems=rest.problems.with_only(rest.problems, left_out=left_out))


def check_reward(key: str, encoded: EncodedProblems, judge: Reward) -> None:
    """Fail before any work on a reward that names a column which problems don't have, or gives no number.

    It is asked of the first problems' own answers, or without one of their questions.

    Raises:
        UserError: the reward, the column and the first of these problems; or what it gave.
    """
    problems = encoded.problems
    for name, entry in judge.entries.items():
        needed = names_of(entry.function).needed if entry.function else frozenset()
        for column in sorted(needed - GIVEN, key=lambda name: (name not in _OURS, name)):
            places = [place for place, problem in enumerate(problems) if column not in problem.columns]
            if places:
                remedy = "rename the argument, give it a default, or add the column"
                if column in _OURS:
                    remedy = f"what other programs call so is {_OURS[column]} here, so rename the argument"
                raise UserError(
                    f"config.reward: {name} names {column!r}, a column that {len(places)} of {len(problems)} problems "
                    f"of {key} don't have, the first is problem {places[0]}; {remedy}"
                )
    tried = problems[:_TRIED]
    texts = [encoded.template.answer_text(problem.answer) if problem.answer else problem.question for problem in tried]
    ids = [list(encoded.answers[place]) for place in range(len(tried))]
    readings = [Reading(tokens, text, None, cut=False) for tokens, text in zip(ids, texts, strict=True)]
    failed = judge.judged(readings, tried).failed
    if failed.all() and len(judge.entries) == 1:  # of several, one may be of other problems
        raise UserError(
            f"config.reward: {next(iter(judge.entries))} fails on the answers of the first "
            f"{len(tried)} problems of {key} themselves; mend it"
        )


def check_answers(key: str, problems: EncodedProblems, places: Sequence[int], name: str, most: int) -> None:
    """Fail before any work on references that no rollout has room for: whatever it says, it would be wrong.

    Of a set to evaluate on, or to choose on, some may be: they are counted in a warning.

    Args:
        places: indices of the problems that are asked for.
        name: the key of the most tokens that are generated where the set is used.
        most: that number.
    Raises:
        UserError: an answer takes more tokens, its end included.
    """
    needed = {index: len(problems.answers[index]) + 1 for index in places}
    longer = [index for index in places if needed[index] > most]
    if longer and (key in LEARNED or len(longer) == len(places)):
        raise UserError(
            f"{key}: the answer of problem {longer[0]} takes {needed[longer[0]]} tokens with its end, more than "
            f"{key_name(f'config.{name}')} ({most}); raise it, or drop the problem"
        )
    if longer and hosts.is_first():
        logging.warning(
            "%s: the answers of %d of %d problems take more tokens than config.%s (%d), up to %d; they count as wrong",
            key, len(longer), len(places), name, most, max(needed.values()),
        )  # fmt: skip


def check_prompts(key: str, prompts: Sequence[Ids], most: int, is_cut: bool) -> None:
    """Fail before the first step, not at the one that draws the problem.

    Args:
        most: tokens of a prompt.
        is_cut: by the model's positions, see `fitting_slots`.
    """
    lengths = [len(prompt) for prompt in prompts]
    if max(lengths) > most:
        room = "positions that thought and answer leave" if is_cut else "of config.prompt_slots"
        lower = f"lower {key_name('config.max_latents')} or {key_name('config.max_answer_tokens')}"
        remedy = lower if is_cut else "add a larger bucket there"
        raise UserError(
            f"{key}: problem {lengths.index(max(lengths))} has a prompt of {max(lengths)} tokens, more than the "
            f"{most} {room}; {remedy} or drop the problem"
        )


def say_unknown(key: str, problems: EncodedProblems, unknown: Counter[str]) -> None:
    """Warn of words that the tokenizer doesn't know."""
    tokenizer = problems.template.tokenizer
    texts = zip(problems.prompts, problems.answers, strict=True)
    rows = sum(tokenizer.unk_token_id in (*prompt, *answer) for prompt, answer in texts)
    words = [word for word, _ in unknown.most_common()]
    logging.warning(
        "%s: %d of %d problems have words that the tokenizer doesn't know, %d in all: %s; they are read as %s, and "
        "answers with one count as wrong", key, rows, len(problems), len(words), listed(words), tokenizer.unk_token,
    )  # fmt: skip
