"""Settings for problems of one's own: chosen from the data and the base model, and said."""

from collections import Counter
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from slpo_jax.config import default_config, read_config
from slpo_jax.errors import UserError
from slpo_jax.interop.configs import BackboneConfig
from slpo_jax.kinds import PLAIN
from slpo_jax.origin.identify import identify, newest_checkpoint
from slpo_jax.origin.open import Origin, open_origin
from slpo_jax.origin.settings import made_with
from slpo_jax.rewards.answers import canonical_number
from slpo_jax.run.chosen import Choice, Measured, choices
from slpo_jax.run.sources import load_set, only_errors
from slpo_jax.sections import changed
from slpo_jax.text.file_rows import FILE_READERS
from slpo_jax.text.problem import Problem
from slpo_jax.text.problems import SYNTHETIC_PREFIX, load_problems
from slpo_jax.text.solutions import measured_number
from slpo_jax.text.tokenizer import WORDS, words_of

_FEW_WORDS = 1_000


def own_settings(
    train: str,
    valid: str = "",
    eval: Mapping[str, str] | None = None,
    base: str = "",
    fields: Mapping[str, str] | None = None,
) -> tuple[ConfigDict, list[str]]:
    """A config for problems of one's own.

    Args:
        train, valid: sources as `config.data` takes them; without validation problems some are set apart.
        eval: sets to evaluate on by name; without any some problems are set apart.
        base: what the weights begin with, as `config.init` takes it; "" is a small GPT-2 from random ones that reads
            the data's words where they are few, else bytes.
        fields: `config.data.fields`.
    Returns:
        the config, and a line for each choice: every key that was set, its value and the reason.
    Raises:
        UserError: a source or the base model can't be used.
    """
    with only_errors():  # the run warns of the data when it reads them
        return _chosen(train, valid, dict(eval or {}), base, fields or {})


def _chosen(
    train: str, valid: str, eval: dict[str, str], base: str, fields: Mapping[str, str]
) -> tuple[ConfigDict, list[str]]:
    config = default_config()
    config.data.fields.update(fields)
    chosen = [_put(config, _sets(config, train, valid, eval))]
    given = load_set(read_config(config), "config.data.train", config.data.train, texts=True)
    chosen.append(_put(config, answers_of(given)))
    words = 0 if base else few_words(given)
    origin, latents = _put_start(config, base, words)
    token = f"one for each of the {words} words of the training data" if words else "a token a byte"
    why = "as given" if base else f"without a base model: random weights, {token}"
    start = {key: config[key] for key in ("init", "reasoner", "tokenizer") if config[key]}
    chosen.append(Choice(start, why))
    chosen += [_put(config, each) for each in choices(_measured(config, origin, latents))]
    return config, list(map(str, chosen))


def _put(config: ConfigDict, choice: Choice) -> Choice:
    values = dict(choice.values)
    config.data.eval.update(values.pop("data.eval", {}))
    config.update_from_flattened_dict(values)
    return choice


def few_words(problems: Sequence[Problem]) -> int:
    """How many words problems have, where they are so few that each can be a token: ten problems to a word; else 0."""
    texts = (text for each in problems for text in (each.question, *each.steps, each.answer))
    return len(words_of(texts, min(len(problems) // 10, _FEW_WORDS)))


def _put_start(config: ConfigDict, base: str, words: int) -> tuple[Origin, int]:
    """What the run starts from, and its number of latents if it is a latent reasoner already, else 0."""
    quiet = {"model.dtype": "float32", "model.scan_layers": False}  # which ask no device, before jax is set up
    if not base:
        config.tokenizer = WORDS if words else "bytes"
        settings = changed(read_config(config), quiet)
        return open_origin(settings, None, lambda: load_set(settings, "config.data.train", config.data.train)), 0
    config.init = newest_checkpoint(base)
    identity = identify(config.init)
    config.reasoner = identity.reasoner or f"{PLAIN.name}_{identity.backbone}"
    origin = open_origin(changed(read_config(config), quiet), identity)
    if not origin.kind.has_latents:
        raise UserError(
            f"{base}: is a reasoner in words, without latents; give its base model, or a config of your own"
        )
    return origin, 0 if origin.is_base else made_with(identity).get("max_latents") or 2 * origin.kind.latents


def _sets(config: ConfigDict, train: str, valid: str, eval: dict[str, str]) -> Choice:
    """Where problems come from; what isn't given is a split of the training data, or a tenth of it."""
    lacking = [name for name, given in (("validation", valid), ("test", eval)) if not given]
    valid = valid or _split(config, train, "valid")
    eval = eval or {"test": _split(config, train, "test")}
    why = f"no {' or '.join(lacking)} set was given" if lacking else "as given"
    if any(source.startswith(f"{train}[") for source in (valid, *eval.values())):
        why += "; a tenth of the problems each is set apart, by their place in the source"
    rest = f"{train}[train]" if f"{train}[test]" in eval.values() else train  # without `valid` it is anyhow
    return Choice({"data.train": rest, "data.valid": valid, "data.eval": eval}, why)


def _split(config: ConfigDict, train: str, name: str) -> str:
    """The source of a split of the training data's source if it has one, else a part of it."""
    if train.startswith(SYNTHETIC_PREFIX):
        return SYNTHETIC_PREFIX + name
    if train.lower().endswith(tuple(FILE_READERS)) or "@" in train:
        return f"{train}[{name}]"
    fields = read_config(config).data.fields
    try:
        load_problems(train, role="test" if name == "test" else "validation", answers="texts", fields=fields)
    except UserError:  # it has no such split
        return f"{train}[{name}]"
    return train


def answers_of(problems: Sequence[Problem]) -> Choice:
    """How answers are read: as numbers where nearly all are some, so that the others are mistakes; else as texts."""
    texts = [each.answer for each in problems]
    others = [text for text in texts if canonical_number(text) is None and measured_number(text) is None]
    if 10 * len(others) <= len(texts):
        return Choice({"prompt.answers": "auto"}, f"{len(texts) - len(others):,} of {len(texts):,} answers are numbers")
    why = f"{len(others):,} of {len(texts):,} answers are no numbers, {others[0][:40]!r} for one; compared as texts"
    return Choice({"prompt.answers": "texts"}, why)


def _measured(config: ConfigDict, origin: Origin, latents: int) -> Measured:
    settings, template, model = read_config(config), origin.template, origin.description.model
    sources = {"config.data.train": config.data.train, "config.data.valid": config.data.valid}
    sources |= {f"config.data.eval.{name}": source for name, source in config.data.eval.items()}
    sets = {key: load_set(settings, key, source) for key, source in sources.items()}
    every, train = [each for problems in sets.values() for each in problems], sets["config.data.train"]
    answers = [len(ids) + 1 for ids in template.answer_ids([each.answer for each in every], Counter())]
    steps = template.step_ids([each.steps for each in train])
    return Measured(
        problems=len(train),
        steps=[len(each.steps) for each in train],
        prompts=list(map(len, template.prompts([each.question for each in every], Counter()))),
        answers=answers,
        written=[sum(map(len, ids)) + size for ids, size in zip(steps, answers, strict=False)],
        parameters=_parameters(model) if config.init else 0,
        positions=model.n_positions if config.init else 0,
        latents=latents,
    )


def _parameters(model: BackboneConfig) -> int:
    """How many a model has, roughly."""
    return 12 * model.n_layer * model.n_embd**2 + model.vocab_size * model.n_embd
