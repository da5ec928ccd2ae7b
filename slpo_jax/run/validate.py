"""Whether what a config asks for can be done with what it starts from."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from slpo_jax.checkpoints.architectures import IN_WORDS, REASONERS, Architecture
from slpo_jax.checkpoints.checkpoint import Checkpoint
from slpo_jax.config.config import Config
from slpo_jax.data.batches import EncodedProblems
from slpo_jax.data.chat import PromptConfig
from slpo_jax.data.templates import listed
from slpo_jax.errors import UserError
from slpo_jax.io import hosts
from slpo_jax.io.workdir import Workdir
from slpo_jax.models.parts import LATENT_POLICY
from slpo_jax.policy.latent_policies import LatentPolicy
from slpo_jax.rewards.reward import Reward
from slpo_jax.stages import EVALUATE, IMITATE, RL


def check_start(config: Config, checkpoint: Checkpoint, workdir: Workdir | None) -> None:
    """What an imported checkpoint lacks must be trained, or not be asked for; thoughts must be made of something."""
    architecture = checkpoint.architecture
    prompt = config.prompt
    config.latent_policy.selected.check(config, architecture)
    _check_recipe(config, architecture)
    default = PromptConfig(answers=prompt.answers if prompt.marked_style("after_mark") == prompt.answers else "auto")
    asked = [key for key, value in vars(default).items() if getattr(config.prompt, key) != value]
    for key in asked:
        if key not in architecture.prompt_keys:
            others = ", ".join(name for name, (each, _) in REASONERS.items() if key in each.prompt_keys)
            raise UserError(
                f"config.prompt.{key}: {config.reasoner} asks and answers in its own way; leave it out, or use {others}"
            )
    if not architecture.has_gate and config.gate.enabled:
        raise UserError(f"config.gate.enabled: True, but a {architecture.name} reasoner has no gate; set it to False")
    finished = workdir.finished_stages() if workdir else []
    if checkpoint.is_base and IMITATE not in {*config.stages, *finished}:
        raise UserError(
            f"config.init: {config.init} is a base model and no {config.reasoner} yet (it lacks the "
            f"{checkpoint.lacks}); put imitate into config.stages, give a reasoner's checkpoint, or ask it in "
            f"words with config.reasoner={IN_WORDS}"
        )
    trains = set(config.stages) != {EVALUATE} or bool(finished)
    if config.gate.enabled and config.init and not checkpoint.description.gate_trained and not trains:
        raise UserError(
            f"config.gate.enabled: {config.init} comes without a trained stopping gate; set it to False for a fixed "
            "number of latents, or train a gate with the cold_start stage"
        )


def _check_recipe(config: Config, architecture: Architecture) -> None:
    """What imitation teaches must be a thought of this architecture's."""
    recipe = config.imitate.recipe or architecture.default_recipe
    if (
        IMITATE in config.stages
        and recipe in architecture.not_taught_by
        and (config.max_latents or not architecture.has_latents)
    ):
        raise UserError(
            f"config.imitate.recipe: {recipe} doesn't teach {config.reasoner} to think; leave it out for its own, "
            f"{architecture.default_recipe}"
        )


def check_sizes(config: Config, latent_policy: LatentPolicy) -> None:
    """There must be as many steps as a thought has at least."""
    name, most = f"config.latent_policy.{config.latent_policy.name}", config.max_latents
    if 0 < most < latent_policy.least:
        raise UserError(
            f"{name}.least: {latent_policy.least} steps before a thought may end are more than config.max_latents "
            f"({most}); lower it or raise that"
        )


def check_latent_policy(config: Config, stored: dict[str, Any], shapes: dict[str, Any], may_lack: bool) -> None:
    """The latent policy's own parameters must be of this one, and be there, be trained, or be known to be lacking."""
    name = config.latent_policy.name
    ours, theirs = (jax.tree.map(lambda x: x.shape, tree.get(LATENT_POLICY)) for tree in (shapes, stored))
    if theirs is not None and theirs != ours:
        raise UserError(
            f"config.latent_policy.name: {config.init} has parameters of another latent policy than {name}, or of "
            "another width; set config.latent_policy as it was trained with"
        )
    if ours is not None and theirs is None and RL not in config.stages and not may_lack:
        raise UserError(
            f"config.latent_policy.name: {config.init} comes without the parameters of {name}; train them in the stage "
            "rl, or use another latent policy"
        )


def fitting_slots(config: Config, positions: int) -> tuple[int, ...]:
    """The buckets, cut to what the model's positions leave for prompts."""
    others = config.max_latents + max(config.max_answer_tokens, config.evaluate.max_answer_tokens or 0)
    if others >= positions and config.init:
        what = f"{others - config.max_latents} answer tokens leave a prompt none of the {positions} positions of "
        if not config.max_latents:
            raise UserError(f"config.max_answer_tokens: {what}{config.init}; lower it")
        raise UserError(
            f"config.max_latents: {config.max_latents} latents and {what}{config.init}; lower it or "
            "config.max_answer_tokens"
        )
    if not config.init and max(config.prompt_slots) + others > positions:
        prompt = max(config.prompt_slots)
        raise UserError(
            f"config.model.n_positions: {positions} is less than the {prompt + others} slots of prompt ({prompt}), "
            f"latents ({config.max_latents}) and answer ({others - config.max_latents}) together; "
            "raise it, or lower config.prompt_slots, config.max_latents or config.max_answer_tokens"
        )
    return tuple(sorted({min(slots, positions - others) for slots in config.prompt_slots}))


def earnable(problems: EncodedProblems, where: str, judge: Reward) -> EncodedProblems:
    """The problems whose reference earns what it should, in the text in which it is taught; others are counted.

    Those with words that the tokenizer doesn't know stay: they count as wrong, as `say_unknown` says.

    Raises:
        UserError: there is none.
    """
    unknown = problems.template.tokenizer.unk_token_id
    lost = [i for i in judge.unearned(problems.answers, problems.problems) if unknown not in problems.answers[i]]
    if not lost:
        return problems
    text = problems.template.answer_text(problems.problems[lost[0]].answer)
    read = judge.read(np.array([*problems.answers[lost[0]], problems.template.eos_id], np.int32)).answer
    said = f"{text!r} is read as {read!r}" if read else f"{text!r} has no answer when it is read"
    if len(lost) == len(problems):
        raise UserError(f"{where}: {said}, and no answer of the {len(lost)} is right itself; see config.prompt.answers")
    if hosts.is_first():
        logging.warning("%s: left out %d of %d problems, whose own answers would be wrong: %s", where, len(lost),
                        len(problems), said)  # fmt: skip
    kept = problems.subset(np.setdiff1d(np.arange(len(problems)), lost))
    return dataclasses.replace(kept, left_out=problems.left_out + len(lost), measured=problems.measured)


def check_answers(config: Config, key: str, problems: EncodedProblems, used: Sequence[int]) -> None:
    """Fail before any work on references that no rollout has room for: whatever it says, it would be wrong.

    Of a set to evaluate on, or to choose on, some may be: they are counted in a warning.

    Args:
        used: indices of the problems that are asked for.
    Raises:
        UserError: an answer takes more tokens, its end included, than are generated where the set is used.
    """
    trains = key == "config.data.train"
    own = not trains and config.evaluate.max_answer_tokens
    name = "evaluate.max_answer_tokens" if own else "max_answer_tokens"
    needed = {index: len(problems.answers[index]) + 1 for index in used}
    most = own or config.max_answer_tokens
    longer = [index for index in used if needed[index] > most]
    if longer and (trains or len(longer) == len(used)):
        raise UserError(
            f"{key}: the answer of problem {longer[0]} takes {needed[longer[0]]} tokens with its end, more than "
            f"config.{name} ({most}); raise it, or drop the problem"
        )
    if longer and hosts.is_first():
        logging.warning(
            "%s: the answers of %d of %d problems take more tokens than config.%s (%d), up to %d; they count as wrong",
            key, len(longer), len(used), name, most, max(needed.values()),
        )  # fmt: skip


def check_prompts(config: Config, key: str, problems: EncodedProblems, most: int) -> None:
    """Fail before the first step, not at the one that draws the problem."""
    used = config.evaluate.limit if key.startswith("config.data.eval") else 0
    lengths = [len(prompt) for prompt in problems.prompts[: used or None]]
    if max(lengths) > most:
        cut = most < max(config.prompt_slots)  # by the model's positions: see `fitting_slots`
        room = "positions that thought and answer leave" if cut else "of config.prompt_slots"
        remedy = "lower config.max_latents or config.max_answer_tokens" if cut else "add a larger bucket there"
        raise UserError(
            f"{key}: problem {lengths.index(max(lengths))} has a prompt of {max(lengths)} tokens, more than the "
            f"{most} {room}; {remedy} or drop the problem"
        )


def say_unknown(key: str, problems: EncodedProblems, unknown: Counter[str]) -> None:
    """A line on words that the tokenizer doesn't know."""
    tokenizer = problems.template.tokenizer
    texts = zip(problems.prompts, problems.answers, strict=True)
    rows = sum(tokenizer.unk_token_id in (*prompt, *answer) for prompt, answer in texts)
    words = [word for word, _ in unknown.most_common()]
    logging.warning(
        "%s: %d of %d problems have words that the tokenizer doesn't know, %d in all: %s; they are read as %s, and "
        "answers with one count as wrong", key, rows, len(problems), len(words), listed(words), tokenizer.unk_token,
    )  # fmt: skip
