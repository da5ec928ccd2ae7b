"""Settings for problems of one's own: chosen from the data and the base model, and said."""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from absl import logging
from ml_collections import ConfigDict

from slpo_jax.architectures import architecture_of
from slpo_jax.checkpoints.checkpoint import Checkpoint, find_checkpoint
from slpo_jax.checkpoints.decode_settings import made_with
from slpo_jax.checkpoints.identity import identify
from slpo_jax.config.config import default_config, read_config
from slpo_jax.config.config_files import override, read_config_file, shipped
from slpo_jax.config.sections import changed
from slpo_jax.data.batches import encode_problems
from slpo_jax.data.dataset_rows import NoSplit, open_splits, part_of
from slpo_jax.data.generated import task_of
from slpo_jax.data.gym import is_gym
from slpo_jax.data.problem import Problem
from slpo_jax.data.record_readers import FILE_READERS
from slpo_jax.data.tokenizer import BYTES, WORDS, words_of
from slpo_jax.errors import UserError
from slpo_jax.io.files import flatten
from slpo_jax.rewards.answers import canonical_number
from slpo_jax.run.automatic_settings import Choice, Measured, choices
from slpo_jax.run.sources import DEMOS, EVAL, TRAIN, VALID, learned_from, load_set

KEYS = {"train": "data.train", "valid": "data.valid", "base": "init"}
"""Of the config, by flag."""
_FEW_WORDS = 1_000

_SOURCES = ("data.train", "data.valid", "init")  # which are cut into parts, and resolved
_START = ("init", "reasoner", "tokenizer")


def requested(
    start: str | ConfigDict,
    sources: Mapping[str, str],
    tests: Mapping[str, str],
    changes: Mapping[str, Any],
    begin: Callable[[int], None],
    texts: bool = False,
    cut: Callable[[ConfigDict], None] | None = None,
) -> tuple[ConfigDict, list[str]]:
    """The config that a command or a call asks for, and the keys that it sets beside the config's file.

    Args:
        start: a shipped config's name, a config file, or what one made; "" has the settings chosen from the problems to
            train on, and shown.
        sources: of train, valid and base; "" is the config's.
        tests: sets to evaluate on, NAME = source, instead of the config's.
        changes: further keys by dotted name, or nested.
        begin: sets jax up for `config.cpu_devices`, before a base model of ours asks for devices.
        texts: see `override`.
        cut: makes less of the config's problems, before any are read.
    Raises:
        UserError: a key or a file can't be used, or one is given twice.
    """
    changes = {key.removeprefix("config."): value for key, value in changes.items()}
    written = {KEYS[name]: f"--{name}={source}" for name, source in sources.items() if source}
    for name, source in tests.items():
        written |= dict.fromkeys((f"data.eval.{name}", "data.eval"), f"--test={name}={source}")
    for key in (*changes, *flatten(changes)):
        if key in written:
            raise UserError(f"{written[key]}: config.{key} is given too; leave one of the two out")
    if start and sources["base"]:
        raise UserError("--base: goes with --train and without a config; beside a config set config.init")
    if isinstance(start, ConfigDict):
        config = start.copy_and_resolve_references()
    else:
        config = read_config_file(start) if start else default_config()
    if tests:
        config.data.eval = ConfigDict(dict(tests))
    own = {KEYS[name]: source for name, source in sources.items() if source}
    override(config, own)
    override(config, changes, texts)
    given = [*own, *flatten(changes)]
    if not start and not config.data.train:
        raise UserError(f"--config: not given; give one of {', '.join(shipped())}, a file, or --train=FILE")
    if cut:
        cut(config)
    begin(read_config(config).cpu_devices)
    if not start:
        print("\n".join(derived_settings(config, given)), file=sys.stderr)
    return config, given


def derived_settings(config: ConfigDict, given: Collection[str] = ()) -> list[str]:
    """Make a config for problems of one's own.

    Args:
        config: `default_config()` with what the user has set, which gets the rest. It has `data.train`; without
            `data.valid` or `data.eval` some problems are set apart; `init` is what the weights begin with, and "" a
            small GPT-2 from random ones that reads the data's words where they are few, else bytes.
        given: keys that the user has set, which stay as they are and which all else follows from.
    Returns:
        a line for each choice: every key that was set, its value and the reason.
    Raises:
        UserError: a source or the base model can't be used.
    """
    every, said = flatten(config.to_dict()), []
    stays = {key: every[key] for key in given if key in every and key not in _SOURCES}

    def put(choice: Choice) -> None:
        """Set what a choice says, but for what stays as it is."""
        choice = choice._replace(values={key: value for key, value in choice.values.items() if key not in stays})
        values = dict(choice.values)
        with config.unlocked():
            config.data.eval = ConfigDict(values.pop("data.eval", config.data.eval))
        config.update_from_flattened_dict(values)
        said.extend([str(choice)] * bool(choice.values))

    if "min_latents" not in stays:  # it follows from the most
        config.min_latents = 1
    data = read_config(config).data
    put(_sets(data.train, data.valid, dict(data.eval)))
    settings = read_config(config)
    problems, data = learned_from(settings, texts=True), settings.data
    put(answers_of(problems))
    words = 0 if config.init or config.tokenizer else few_words(problems, architecture_of(config.reasoner).needs_words)
    config.init = newest_checkpoint(config.init) if config.init else ""
    with contextlib.ExitStack() as quiet:  # the run says what is odd about what it starts from
        quiet.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity(logging.ERROR)
        checkpoint, latents = _start(config, "reasoner" in stays, words)
    token = f", one for each of the {words} words of the training data" * bool(words)
    token = token or ", a token a byte" * (config.tokenizer == BYTES)
    why = "as given" if config.init else f"without a base model: random weights{token}"
    put(Choice({key: config[key] for key in _START if config[key]}, why))
    copied = {DEMOS: data.demos} if data.demos else {}
    sources = copied | {TRAIN: data.train, VALID: data.valid}
    sources |= {EVAL + name: source for name, source in data.eval.items()}
    settings = read_config(config)
    sets = {key: load_set(settings, key, source) for key, source in sources.items()}
    for each in choices(_measured(sets, checkpoint, bool(config.init), latents, stays)):
        put(each)
    return [*said, f"as given, not chosen: {', '.join(sorted(stays))}"] if stays else said


def few_words(problems: Sequence[Problem], needed: bool = False) -> int:
    """How many words problems have, where they are so few that each can be a token: ten problems to a word; else 0.

    Args:
        needed: bytes can't be tokens, so that a word may have fewer problems.
    """
    texts = (text for each in problems for text in (each.question, *each.steps, each.answer))
    return len(words_of(texts, _FEW_WORDS if needed else min(len(problems) // 10, _FEW_WORDS)))


def _start(config: ConfigDict, is_named: bool, words: int) -> tuple[Checkpoint, int]:
    """What the run starts from, which is put there, and the number of latents of a latent reasoner, else 0.

    Args:
        is_named: the user has said what reasoner it is.
        words: each of which can be a token.
    """
    quiet = {"model.dtype": "float32", "model.scan_layers": False}  # which ask no device, before jax is set up
    if not config.init:
        config.tokenizer = config.tokenizer or (WORDS if words else BYTES)
        settings = changed(read_config(config), quiet)
        return find_checkpoint(settings, None, lambda: learned_from(settings)), 0
    identity = identify(config.init, config.base, config.lora_alpha)
    config.init = identity.source
    if not is_named:
        config.reasoner = identity.reasoner
    checkpoint = find_checkpoint(changed(read_config(config), quiet), identity)
    if not checkpoint.architecture.has_latents and not is_named:
        raise UserError(
            f"{config.init}: is a reasoner in words, without latents; give its base model, or --config.reasoner="
            f"{config.reasoner} to train it as one"
        )
    if checkpoint.lacks or not checkpoint.architecture.has_latents:
        return checkpoint, 0
    return checkpoint, made_with(identity).get("max_latents") or 2 * checkpoint.architecture.latents


def _sets(train: str, valid: str, eval: dict[str, str]) -> Choice:
    """Where problems come from; what isn't given is a split of the training data, or a tenth of it."""
    lacking = [name for name, given in (("validation", valid), ("test", eval)) if not given]
    valid = valid or _split(train, "valid")
    eval = eval or {"test": _split(train, "test")}
    why = f"no {' or '.join(lacking)} set was given" if lacking else "as given"
    if any(source.startswith(f"{train}[") for source in (valid, *eval.values())):
        why += "; a tenth of the problems each is set apart, by their place in the source"
    rest = f"{train}[train]" if f"{train}[test]" in eval.values() else train  # without `valid` it is anyhow
    return Choice({"data.train": rest, "data.valid": valid, "data.eval": eval}, why)


def _split(train: str, name: str) -> str:
    """The source of a split of the training data's source if it has one, else a part of it.

    Raises:
        UserError: it can't be had, so that nobody knows.
    """
    if task := task_of(train):
        return f"{task}:{name}"
    if is_gym(train):
        return f"{train.partition('@')[0]}@{name}"
    whole, part = part_of(train)
    if part or whole.lower().endswith(tuple(FILE_READERS)) or "@" in whole:
        return f"{whole}[{name}]"
    try:
        open_splits(train, "test" if name == "test" else "validation")
    except NoSplit:
        return f"{train}[{name}]"
    return train


def answers_of(problems: Sequence[Problem]) -> Choice:
    """How answers are read: as numbers where nearly all are some, and the others are left out; else as texts."""
    texts = [each.answer for each in problems if each.answer]
    if not texts:
        return Choice({}, "no problem has an answer")
    others = [text for text in texts if canonical_number(text) is None]
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
    """What the problems and the model tell."""
    template, model, demos = checkpoint.template, checkpoint.description.model, next(iter(sets.values()))
    encoded = [encode_problems(template, problems, problems is demos, Counter()) for problems in sets.values()]
    answers = [len(ids) + 1 for each in encoded for ids in each.answers]
    steps = encoded[0].steps
    parameters = 12 * model.n_layer * model.n_embd**2 + model.vocab_size * model.n_embd  # roughly
    return Measured(
        problems=len(sets[TRAIN]),
        steps=[len(each.steps) for each in demos],
        prompts=[len(ids) for each in encoded for ids in each.prompts],
        answers=answers,
        written=[sum(map(len, ids)) + size for ids, size in zip(steps, answers, strict=False)],
        parameters=parameters if is_pretrained else 0,
        positions=model.n_positions if is_pretrained else 0,
        latents=latents,
        architecture=type(checkpoint.architecture),
        given=given,
    )
