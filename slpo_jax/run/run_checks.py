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
from slpo_jax.data.templates import Ids, list_words
from slpo_jax.errors import UserError, key_name
from slpo_jax.rewards.functions import GIVEN, names_of
from slpo_jax.rewards.reward import Reading, Reward
from slpo_jax.run.sources import LEARNED
from slpo_jax.runtime import hosts
from slpo_jax.stages import EVALUATE, IMITATE

_TRIED = 8  # problems that a reward is tried on before any work
_OURS = {
    "solution_str": "completion",
    "response": "completion",
    "ground_truth": "answer",
}  # by what verl calls them


def check_start(
    config: Config, checkpoint: Checkpoint, finished: Collection[str]
) -> None:
    """Refuse a start that lacks what is not trained but asked for, and thoughts that are made of nothing.

    Args:
        finished: names of the stages that the workdir holds.
    """
    architecture = checkpoint.description.architecture
    prompt = config.prompt
    name = config.latent_policy.name
    reasoner = config.reasoner
    config.latent_policy.selected.check(
        name, architecture, reasoner, config.max_latents, prompt.closing
    )
    # The recipe has to suit the architecture, at least where thoughts are taught.
    recipe = config.imitate.recipe or architecture.default_recipe
    is_taught = config.max_latents > 0 or not architecture.has_latents
    is_unfit = recipe in architecture.not_taught_by
    if IMITATE in config.stages and is_taught and is_unfit:
        raise UserError(
            f"config.imitate.recipe: {recipe} doesn't teach {config.reasoner} to think; leave it out for its own, "
            f"{architecture.default_recipe}"
        )
    # Of config.prompt it knows some keys; the others have to be as they are by default.
    default = PromptConfig()
    if prompt.marked_style("after_mark") == prompt.answers:
        default = PromptConfig(answers=prompt.answers)
    for key, value in vars(default).items():
        if getattr(prompt, key) == value or key in architecture.prompt_keys:
            continue
        others = []
        for other, (kind, _) in REASONERS.items():
            if key in kind.prompt_keys:
                others.append(other)
        raise UserError(
            f"config.prompt.{key}",
            f"{reasoner} asks and answers in its own way; leave it out, or use {', '.join(others)}",
        )
    if not architecture.has_gate and config.gate.enabled:
        raise UserError(
            f"config.gate.enabled: True, but a {architecture.name} reasoner has no gate; set it to False"
        )
    # A base model becomes a reasoner by imitation alone.
    if checkpoint.lacks and IMITATE not in {*config.stages, *finished}:
        raise UserError(
            f"{key_name('config.init')}: {config.init} is a base model and no {config.reasoner} yet (it lacks the "
            f"{checkpoint.lacks}); put imitate into config.stages, give a reasoner's checkpoint, or ask it in "
            f"words with {key_name('config.reasoner')}={IN_WORDS}"
        )
    # To evaluate alone, the gate must have been trained.
    trains = set(config.stages) != {EVALUATE} or bool(finished)
    is_untrained = config.init and not checkpoint.description.gate_trained
    if config.gate.enabled and is_untrained and not trains:
        raise UserError(
            f"config.gate.enabled: {config.init} comes without a trained stopping gate; set it to False for a fixed "
            "number of latents, or train a gate with the cold_start stage"
        )


def fitting_slots(
    slots: Collection[int], latents: int, answers: int, positions: int, init: str
) -> tuple[int, ...]:
    """Return the buckets, cut to what the model's positions leave for prompts.

    Args:
        latents, answers: the most that there may be of each.
        init: whose positions they are; "" of random weights, which all buckets must fit.
    """
    others = latents + answers
    prompt = max(slots)
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


def drop_unverifiable(
    problems: EncodedProblems, where: str, judge: Reward
) -> EncodedProblems:
    """Keep the problems whose reference earns what it should, in the text in which it is taught; count others.

    Those with words that the tokenizer doesn't know stay: they count as wrong, as `say_unknown` says.

    Raises:
        UserError: there is none.
    """
    unknown = problems.template.tokenizer.unk_token_id
    unearned = judge.find_unearned(problems.answers, problems.problems)
    places = [i for i in unearned if unknown not in problems.answers[i]]
    if not places:
        return problems
    # Say how the first of them is read.
    first = places[0]
    template = problems.template
    text = template.answer_text(problems.problems[first].answer)
    ids = np.array([*problems.answers[first], template.eos_id], np.int32)
    answer = judge.read(ids).answer
    problem = f"{text!r} has no answer when it is read"
    if answer:
        problem = f"{text!r} is read as {answer!r}"
    if len(places) == len(problems):
        raise UserError(
            f"{where}: {problem}, and no answer of the {len(places)} is right itself; "
            f"{key_name('config.prompt.answers')} says how answers are read"
        )
    if hosts.is_first():
        logging.warning(
            "%s: left out %d of %d problems, whose own answers would be wrong: %s",
            where,
            len(places),
            len(problems),
            problem,
        )
    rest = problems.subset(np.setdiff1d(np.arange(len(problems)), places))
    left_out = problems.problems.left_out + len(places)
    counted = rest.problems.with_only(rest.problems, left_out=left_out)
    return dataclasses.replace(rest, problems=counted)


def check_reward(
    key: str, encoded: EncodedProblems, judge: Reward, latents: int
) -> None:
    """Fail before any work on a reward that names a column which problems don't have, or gives no number.

    It is asked of the first problems' own answers as rollouts give them, or without one of their questions.

    Args:
        latents: how many the thoughts before these answers take.
    Raises:
        UserError: the reward, the column and the first of these problems; or what it gave.
    """
    problems = encoded.problems
    # Every column that a function names has to be in every record; first look for names of other programs.
    for name, entry in judge.entries.items():
        if entry.function is None:
            continue
        columns = names_of(entry.function).needed - GIVEN
        for column in sorted(columns, key=lambda name: (name not in _OURS, name)):
            places = []
            for place, problem in enumerate(problems):
                if column not in problem.columns:
                    places.append(place)
            if not places:
                continue
            remedy = "rename the argument, give it a default, or add the column"
            if column in _OURS:
                remedy = f"what other programs call so is {_OURS[column]} here, so rename the argument"
            raise UserError(
                f"config.reward: {name} names {column!r}, a column that {len(places)} of {len(problems)} records in "
                f"{key} don't have, the first is problem {places[0]}; {remedy}"
            )
    # Ask the reward of a few completions that should be right.
    tried = problems[:_TRIED]
    readings = []
    for place, problem in enumerate(tried):
        if problem.answer:
            ids = [*encoded.answers[place], encoded.template.eos_id]
            readings.append(judge.read(np.array(ids, np.int32), latents))
        else:
            readings.append(Reading([], problem.question, None, False, latents))
    by_name = judge.judge(readings, tried).by_name
    # One that gives no number may be for other problems: then it gives None, and does not fail.
    for name, entry in judge.entries.items():
        gives_numbers = not np.isnan(by_name[name]).all()
        if gives_numbers or entry.follows:
            continue
        if judge.asking(name).judge(readings, tried).failed.all():
            raise UserError(
                f"config.reward: {name} fails on the answers of the first {len(tried)} records in {key} themselves; "
                "mend it, or have it give None where it does not apply"
            )


def check_answers(
    key: str, problems: EncodedProblems, places: Sequence[int], name: str, most: int
) -> None:
    """Fail before any work on references that no rollout has room for: whatever it says, it would be wrong.

    Of a set to evaluate on, or to choose on, some may be: they are counted in a warning.

    Args:
        places: indices of the problems that are asked for.
        name: the key of the most tokens that are generated where the set is used.
        most: that number.
    Raises:
        UserError: an answer takes more tokens, its end included.
    """
    # An answer's end is one token more.
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
            key,
            len(longer),
            len(places),
            name,
            most,
            max(needed.values()),
        )


def check_prompts(key: str, prompts: Sequence[Ids], most: int, is_cut: bool) -> None:
    """Fail before the first step, not at the one that draws the problem.

    Args:
        most: tokens of a prompt.
        is_cut: by the model's positions, see `fitting_slots`.
    """
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    if longest <= most:
        return
    room = "of config.prompt_slots"
    remedy = "add a larger bucket there"
    if is_cut:
        room = "positions that thought and answer leave"
        remedy = f"lower {key_name('config.max_latents')} or {key_name('config.max_answer_tokens')}"
    raise UserError(
        f"{key}: problem {lengths.index(longest)} has a prompt of {longest} tokens, more than the "
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
        "answers with one count as wrong",
        key,
        rows,
        len(problems),
        len(words),
        list_words(words),
        tokenizer.unk_token,
    )
