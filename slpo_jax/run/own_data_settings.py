"""Settings for problems of one's own: chosen from the data and the base model, and said."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from absl import logging

from slpo_jax.architectures import architecture_of
from slpo_jax.checkpoints.checkpoint import Checkpoint, find_checkpoint
from slpo_jax.checkpoints.identity import identify, newest_checkpoint
from slpo_jax.checkpoints.saved_config import config_of, stated_settings
from slpo_jax.config.config import Config
from slpo_jax.config.overrides import merge_settings, values
from slpo_jax.data.batches import encode_problems
from slpo_jax.data.dataset_rows import NoSplit, is_saved_alone, open_splits, part_of
from slpo_jax.data.generated import task_of
from slpo_jax.data.generated_sets import is_gym
from slpo_jax.data.problem import Problem
from slpo_jax.data.problems import number_of
from slpo_jax.data.record_readers import reader_of
from slpo_jax.data.tokenizer import BYTES, WORDS, words_of
from slpo_jax.errors import UserError, about
from slpo_jax.io.files import flatten
from slpo_jax.run.automatic_settings import Choice, Measured, choices
from slpo_jax.run.sources import DEMOS, EVAL, TRAIN, VALID, learned_from, load_set
from slpo_jax.stages import IMITATE

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
    now = flatten(values(config))
    lines = list[str]()
    # Sources are cut into parts, and resolved.
    given = {key: now[key] for key in keys if key in now and key not in KEYS.values()}

    def with_choice(choice: Choice) -> Config:
        """Return the config with what a choice says, but for what is given."""
        left = {key: value for key, value in choice.values.items() if key not in given}
        if left:
            lines.append(str(choice._replace(values=left)))
        return merge_settings(config, left)

    # First the sets, and how their answers are read.
    data = config.data
    config = with_choice(_choose_sets(data.train, data.valid, data.eval))
    problems = learned_from(config, texts=True)
    data = config.data
    config = with_choice(answers_of(problems))
    # Then the model to start from: the base, or a small one whose tokens are the data's words, or bytes.
    words = 0
    if config.init:
        config = merge_settings(config, {"init": newest_checkpoint(config.init)})
    elif not config.tokenizer:
        words = few_words(problems, architecture_of(config.reasoner).needs_words)
    with contextlib.ExitStack() as quiet:
        # The run itself warns of anything odd about its start.
        quiet.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity(logging.ERROR)
        start, checkpoint, latents = _find_start(config, "reasoner" in given, words)
    why = "as given"
    if not config.init:
        why = "without a base model: random weights"
        if words:
            why += f", one for each of the {words} words of the training data"
        elif start["tokenizer"] == BYTES:
            why += ", a token a byte"
    stated = {key: value for key, value in start.items() if value}
    config = with_choice(Choice(stated, why))
    # With both, all else follows from lengths and sizes.
    sources = {DEMOS: data.demos} if data.demos else {}
    sources[TRAIN] = data.train
    sources[VALID] = data.valid
    for name, source in data.eval.items():
        sources[EVAL + name] = source
    sets = {key: load_set(config, key, source) for key, source in sources.items()}
    # Steps that no stage imitates may be of any kind, such as a verifier's target in the column `solution`.
    imitates = "stages" not in given or IMITATE in config.stages
    measured = _measure(
        sets, sources, checkpoint, bool(config.init), latents, imitates, given
    )
    for choice in choices(measured):
        config = with_choice(choice)
    if given:
        lines.append(f"as given, not chosen: {', '.join(sorted(given))}")
    return config, lines


def few_words(problems: Sequence[Problem], needed: bool = False) -> int:
    """Count the words of problems, where so few that each can be a token: ten problems to a word; else 0.

    Args:
        needed: bytes can't be tokens, so that a word may have fewer problems.
    """
    most = _FEW_WORDS
    if not needed:
        most = min(len(problems) // 10, _FEW_WORDS)
    texts = ((problem.question, *problem.steps, problem.answer) for problem in problems)
    return len(words_of(chain.from_iterable(texts), most))


def _find_start(
    config: Config, is_named: bool, words: int
) -> tuple[dict[str, str], Checkpoint, int]:
    """Return the keys of what the run starts from, that itself, and the number of a reasoner's latents, else 0.

    Args:
        is_named: the user has said what reasoner it is.
        words: each of which can be a token.
    """
    # These ask for no device, as jax is not set up yet.
    quiet = {
        "model.dtype": "float32",
        "model.scan_layers": False,
    }
    start = {
        "init": config.init,
        "reasoner": config.reasoner,
        "tokenizer": config.tokenizer,
    }
    if not config.init:
        start["tokenizer"] = config.tokenizer or (WORDS if words else BYTES)
        settings = merge_settings(config, start, quiet)
        return start, find_checkpoint(settings, None, lambda: learned_from(settings)), 0
    # A base says itself which reasoner it is, unless the user does.
    identity = identify(config.init, config.base, config.lora_alpha)
    if not is_named:
        start["reasoner"] = identity.reasoner
    checkpoint = find_checkpoint(merge_settings(config, start, quiet), identity)
    architecture = checkpoint.description.architecture
    if not architecture.has_latents and not is_named:
        raise UserError(
            f"{start['init']}: is a reasoner in words, without latents; give its base model, or --config.reasoner="
            f"{start['reasoner']} to train it as one"
        )
    if checkpoint.lacks or not architecture.has_latents:
        return start, checkpoint, 0
    # A reasoner already thinks: its own number of latents stays.
    stated = stated_settings(identity, config_of(identity))
    latents = stated.get("max_latents") or 2 * architecture.latents
    return start, checkpoint, latents


def _choose_sets(train: str, valid: str, eval: dict[str, str]) -> Choice:
    """Choose where problems come from; what isn't given is a split of the training data, or a tenth of it."""
    missing = []
    if not valid:
        missing.append("validation")
        valid = _choose_split(train, "valid")
    if not eval:
        missing.append("test")
        eval = {"test": _choose_split(train, "test")}
    why = f"no {' or '.join(missing)} set was given" if missing else "as given"
    if any(source.startswith(f"{train}[") for source in (valid, *eval.values())):
        why += (
            "; a tenth of the problems each is set apart, by their place in the source"
        )
    # Training problems are never those of validation; a test part has to be named.
    rest = f"{train}[train]" if f"{train}[test]" in eval.values() else train
    return Choice({"data.train": rest, "data.valid": valid, "data.eval": eval}, why)


def _choose_split(train: str, name: str) -> str:
    """Return the source of a split of the training data's source if it has one, else a part of it.

    Raises:
        UserError: it can't be had, so that nobody knows.
    """
    # Generated sets make their splits by name.
    if task := task_of(train):
        return f"{task}:{name}"
    if is_gym(train):
        return f"{train.partition('@')[0]}@{name}"
    # A file's parts, as a folder's or a split's, are cut from it.
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
    numbers = len(texts) - len(others)
    if 10 * len(others) <= len(texts):
        why = f"{numbers:,} of {len(texts):,} answers are numbers"
        return Choice({"prompt.answers": "auto"}, why)
    why = f"{len(others):,} of {len(texts):,} answers are no numbers, {others[0][:40]!r} for one; compared as texts"
    return Choice({"prompt.answers": "texts"}, why)


def _measure(
    sets: Mapping[str, Sequence[Problem]],
    sources: Mapping[str, str],
    checkpoint: Checkpoint,
    is_pretrained: bool,
    latents: int,
    imitates: bool,
    given: Mapping[str, Any],
) -> Measured:
    """Measure lengths and sizes of the problems and the model."""
    template = checkpoint.template
    model = checkpoint.description.model
    # The first set is imitated; its steps are encoded too, which the other sets need not have.
    imitated, demos = next(iter(sets.items()))
    prompts = list[int]()
    answers = list[int]()
    written = list[int]()
    for key, problems in sets.items():
        copies = imitates and key == imitated
        with about(f"{key}: {sources[key]}"):
            encoded = encode_problems(template, problems, copies, Counter())
        prompts += [len(ids) for ids in encoded.prompts]
        lengths = [len(ids) + 1 for ids in encoded.answers]
        answers += lengths
        if key == imitated:
            for steps, answer in zip(encoded.steps, lengths, strict=False):
                written.append(sum(map(len, steps)) + answer)
    # A transformer has about twelve squares of its width a layer, and its embeddings.
    blocks = 12 * model.n_layer * model.n_embd**2
    parameters = blocks + model.vocab_size * model.n_embd
    return Measured(
        problems=len(sets[TRAIN]),
        steps=[len(problem.steps) for problem in demos],
        prompts=prompts,
        answers=answers,
        written=written,
        parameters=parameters if is_pretrained else 0,
        positions=model.n_positions if is_pretrained else 0,
        latents=latents,
        architecture=type(checkpoint.description.architecture),
        given=given,
    )
