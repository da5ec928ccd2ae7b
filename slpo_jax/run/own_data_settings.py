"""Settings for problems of one's own: chosen from the data and the base model, and said."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from slpo_jax.architectures import architecture_of
from slpo_jax.checkpoints.checkpoint import Checkpoint, find_checkpoint
from slpo_jax.checkpoints.identity import identify, newest_checkpoint
from slpo_jax.checkpoints.saved_config import config_of, stated_settings
from slpo_jax.config.config import Config
from slpo_jax.config.overrides import changed, values
from slpo_jax.data.batches import encode_problems
from slpo_jax.data.dataset_rows import NoSplit, is_saved_alone, open_splits, part_of
from slpo_jax.data.generated import task_of
from slpo_jax.data.generated_sets import is_gym
from slpo_jax.data.problem import Problem
from slpo_jax.data.problems import number_of
from slpo_jax.data.record_readers import reader_of
from slpo_jax.data.tokenizer import BYTES, WORDS, words_of
from slpo_jax.errors import UserError
from slpo_jax.io.files import flatten
from slpo_jax.run.automatic_settings import Choice, Measured, choices
from slpo_jax.run.sources import DEMOS, EVAL, TRAIN, VALID, learned_from, load_set

KEYS = {"train": "data.train", "valid": "data.valid", "base": "init"}
"""Keys of the config by the flag that sets them."""
_FEW_WORDS = 1_000


def derived_settings(config: Config, keys: Iterable[str]) -> tuple[Config, list[str]]:
    """Put what follows from the problems and the base model below what the user has set.

    Args:
        config: the defaults with what the user has set, which stays and which all else follows from. It has
            `data.train`; without `data.valid` or `data.eval` some problems are set apart; `init` is what the weights
            begin with, and "" a small GPT-2 from random ones that reads the data's words where they are few, else
            bytes.
        keys: that the user has set by name.
    Returns:
        the config, and a line for each choice: every key that was set, its value and the reason.
    Raises:
        UserError: a source or the base model can't be used.
    """
    now, lines = flatten(values(config)), list[str]()
    # Sources are cut into parts, and resolved.
    given = {key: now[key] for key in keys if key in now and key not in KEYS.values()}

    def with_choice(choice: Choice) -> Config:
        """Return the config with what a choice says, but for what is given."""
        choice = choice._replace(values={key: value for key, value in choice.values.items() if key not in given})
        lines.extend([str(choice)] * bool(choice.values))
        return changed(config, choice.values)

    config = with_choice(_sets(config.data.train, config.data.valid, config.data.eval))
    problems, data = learned_from(config, texts=True), config.data
    config = with_choice(answers_of(problems))
    words = 0 if config.init or config.tokenizer else few_words(problems, architecture_of(config.reasoner).needs_words)
    if config.init:
        config = changed(config, {"init": newest_checkpoint(config.init)})
    with contextlib.ExitStack() as quiet:  # the run says what is odd about what it starts from
        quiet.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity(logging.ERROR)
        start, checkpoint, latents = _start(config, "reasoner" in given, words)
    token = f", one for each of the {words} words of the training data" * bool(words)
    token = token or ", a token a byte" * (start["tokenizer"] == BYTES)
    why = "as given" if config.init else f"without a base model: random weights{token}"
    config = with_choice(Choice({key: value for key, value in start.items() if value}, why))
    demos = {DEMOS: data.demos} if data.demos else {}
    sources = demos | {TRAIN: data.train, VALID: data.valid}
    sources |= {EVAL + name: source for name, source in data.eval.items()}
    sets = {key: load_set(config, key, source) for key, source in sources.items()}
    for choice in choices(_measured(sets, checkpoint, bool(config.init), latents, given)):
        config = with_choice(choice)
    return config, [*lines, f"as given, not chosen: {', '.join(sorted(given))}"] if given else lines


def few_words(problems: Sequence[Problem], needed: bool = False) -> int:
    """Count the words of problems, where so few that each can be a token: ten problems to a word; else 0.

    Args:
        needed: bytes can't be tokens, so that a word may have fewer problems.
    """
    texts = (text for problem in problems for text in (problem.question, *problem.steps, problem.answer))
    return len(words_of(texts, _FEW_WORDS if needed else min(len(problems) // 10, _FEW_WORDS)))


def _start(config: Config, is_named: bool, words: int) -> tuple[dict[str, str], Checkpoint, int]:
    """Return the keys of what the run starts from, that itself, and the number of a reasoner's latents, else 0.

    Args:
        is_named: the user has said what reasoner it is.
        words: each of which can be a token.
    """
    quiet = {"model.dtype": "float32", "model.scan_layers": False}  # which ask no device, before jax is set up
    start = {"init": config.init, "reasoner": config.reasoner, "tokenizer": config.tokenizer}
    if not config.init:
        start["tokenizer"] = config.tokenizer or (WORDS if words else BYTES)
        settings = changed(config, start, quiet)
        return start, find_checkpoint(settings, None, lambda: learned_from(settings)), 0
    identity = identify(config.init, config.base, config.lora_alpha)
    if not is_named:
        start["reasoner"] = identity.reasoner
    checkpoint = find_checkpoint(changed(config, start, quiet), identity)
    architecture = checkpoint.description.architecture
    if not architecture.has_latents and not is_named:
        raise UserError(
            f"{start['init']}: is a reasoner in words, without latents; give its base model, or --config.reasoner="
            f"{start['reasoner']} to train it as one"
        )
    if checkpoint.lacks or not architecture.has_latents:
        return start, checkpoint, 0
    stated = stated_settings(identity, config_of(identity))
    return start, checkpoint, stated.get("max_latents") or 2 * architecture.latents


def _sets(train: str, valid: str, eval: dict[str, str]) -> Choice:
    """Choose where problems come from; what isn't given is a split of the training data, or a tenth of it."""
    missing = [name for name, source in (("validation", valid), ("test", eval)) if not source]
    valid = valid or _split(train, "valid")
    eval = eval or {"test": _split(train, "test")}
    why = f"no {' or '.join(missing)} set was given" if missing else "as given"
    if any(source.startswith(f"{train}[") for source in (valid, *eval.values())):
        why += "; a tenth of the problems each is set apart, by their place in the source"
    rest = f"{train}[train]" if f"{train}[test]" in eval.values() else train  # without `valid` it is anyhow
    return Choice({"data.train": rest, "data.valid": valid, "data.eval": eval}, why)


def _split(train: str, name: str) -> str:
    """Return the source of a split of the training data's source if it has one, else a part of it.

    Raises:
        UserError: it can't be had, so that nobody knows.
    """
    if task := task_of(train):
        return f"{task}:{name}"
    if is_gym(train):
        return f"{train.partition('@')[0]}@{name}"
    source, part = part_of(train)
    path = Path(source).expanduser()
    if part or reader_of(path) or is_saved_alone(path) or "@" in source:
        return f"{source}[{name}]"
    try:
        open_splits(train, "test" if name == "test" else "validation")
    except NoSplit:
        return f"{train}[{name}]"
    return train


def answers_of(problems: Sequence[Problem]) -> Choice:
    """Choose how answers are read: as numbers where nearly all are some, and the others are left out; else as texts."""
    texts = [problem.answer for problem in problems if problem.answer]
    if not texts:
        return Choice({}, "no problem has an answer")
    others = [text for text in texts if not number_of(text)]
    if 10 * len(others) <= len(texts):
        return Choice({"prompt.answers": "auto"}, f"{len(texts) - len(others):,} of {len(texts):,} answers are numbers")
    why = f"{len(others):,} of {len(texts):,} answers are no numbers, {others[0][:40]!r} for one; compared as texts"
    return Choice({"prompt.answers": "texts"}, why)


def _measured(
    sets: Mapping[str, Sequence[Problem]],
    checkpoint: Checkpoint,
    is_pretrained: bool,
    latents: int,
    given: Mapping[str, Any],
) -> Measured:
    """Measure what the problems and the model tell."""
    template, model, demos = checkpoint.template, checkpoint.description.model, next(iter(sets.values()))
    encoded = [encode_problems(template, problems, problems is demos, Counter()) for problems in sets.values()]
    answers = [len(ids) + 1 for problems in encoded for ids in problems.answers]
    steps = encoded[0].steps
    parameters = 12 * model.n_layer * model.n_embd**2 + model.vocab_size * model.n_embd  # roughly
    return Measured(
        problems=len(sets[TRAIN]),
        steps=[len(problem.steps) for problem in demos],
        prompts=[len(ids) for problems in encoded for ids in problems.prompts],
        answers=answers,
        written=[sum(map(len, ids)) + size for ids, size in zip(steps, answers, strict=False)],
        parameters=parameters if is_pretrained else 0,
        positions=model.n_positions if is_pretrained else 0,
        latents=latents,
        architecture=type(checkpoint.description.architecture),
        given=given,
    )
