"""Every key of the config refuses what no run could use, before any work, in one line that names it."""

import dataclasses
import math
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from ml_collections import ConfigDict

from slpo_jax.config import Config, default_config, objective_of
from slpo_jax.config.presets import objective_variant
from slpo_jax.config.validate import check
from slpo_jax.errors import UserError
from slpo_jax.training.objectives import OBJECTIVES

HUGE = 2**70


def _leaves(node: ConfigDict, key: str = "config"):
    """(key, value) of every key that is no section with keys of its own."""
    for name in node:
        value = node.get_ref(name).get() if hasattr(node, "get_ref") else node[name]
        if isinstance(value, ConfigDict) and len(value):
            yield from _leaves(value, f"{key}.{name}")
        else:
            yield f"{key}.{name}", value


def _hint(key: str) -> Any:
    """The annotation of a key's field, found by walking the dataclasses from `Config`."""
    owner: Any = Config()
    *names, last = key.split(".")[1:]
    if names[:1] == ["objective"]:
        owner, names = OBJECTIVES[names[1]](), []
    for name in names:
        owner = getattr(owner, name)
    assert last in {field.name for field in dataclasses.fields(owner)}, f"{key} is in no dataclass"
    return get_type_hints(type(owner))[last]


def _bad_values(hint: Any) -> list[Any]:
    """Values that a field with this annotation has to refuse, whatever its range."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        refused = [_bad_values(part) for part in parts if part is not type(None)]
        return [value for values in refused for value in values if value is not None]
    if kind is Literal:
        return [value for value in ("", f"{parts[0]}x", None, 1) if value not in parts]
    if kind is tuple:
        return ["x", None, 1, *((value,) for value in _bad_values(parts[0]) if value is not None)]
    if kind is dict:
        return [{"name": 1}, {"a/b": "file"}, {"": "file"}]
    if hint is int:
        return [-1, -HUGE, HUGE, math.nan, 0.5, True, "1", None]
    if hint is float:
        return [math.nan, math.inf, -math.inf, -1.0, 10**400, True, "1", None]
    return {bool: [0, 1, None, "True"], str: [1, None, True]}[hint]


KEYS = [key for key, value in _leaves(default_config()) if not dataclasses.is_dataclass(_hint(key))]


def _with(key: str, value: Any) -> ConfigDict:
    """The default config with a value that no type check has seen."""
    tree = default_config().to_dict()
    *path, name = key.split(".")[1:]
    node = tree
    for part in path:
        node = node[part]
    node[name] = value
    return ConfigDict(tree)


def _set(config: ConfigDict, key: str, value: Any) -> None:
    with config.unlocked():
        config.update_from_flattened_dict({key: value})


@pytest.mark.parametrize("key", KEYS)
def test_every_key_has_a_range(key):
    for value in _bad_values(_hint(key)):
        with pytest.raises(UserError) as caught:
            check(_with(key, value))
        line = str(caught.value)
        assert line.startswith(f"{key}: ")
        assert "is not valid; " in line
        assert len(line) < 300
        assert "\n" not in line


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("config.objective.slpo.epsilon", 0.0, "above 0"),
        ("config.objective.slpo.advantage", "ppo", "rloo, grpo, pkpo"),
        ("config.objective.pathwise.mixture_weight", 1.5, "from 0 to 1"),
        ("config.latent_policy.name", "free", "latent, additive"),
        ("config.rl.group", 1, "2 or more"),
        ("config.rl.capacities", ((0.5, 0.5),), "ascend to (1, 1)"),
        ("config.rl.capacities", ((0.7, 0.5), (0.6, 0.6), (1.0, 1.0)), "ascend to (1, 1)"),
        ("config.rl.capacities", (), "ascend to (1, 1)"),
        ("config.model.n_head", 0, "a whole number, 1 or more"),
        ("config.model.n_layer", 0, "a whole number, 1 or more"),
        ("config.model.n_embd", 0, "1 or more"),
        ("config.model.dtype", "float16", "auto, float32, bfloat16"),
        ("config.prompt_slots", (), "at least one"),
        ("config.prompt_slots", (0,), "1 or more"),
        ("config.seed", 2**32, "from 0 to 4294967295"),
        ("config.max_latents", -1, "0 or more"),
        ("config.stages", ("imitate", "r"), "imitate, cold_start"),
        ("config.lora_alpha", 0.0, "above 0"),
        ("config.imitate.dropout", 1.5, "below 1"),
        ("config.imitate.dropout", 1.0, "below 1"),
        ("config.imitate.suffix_slots", (0,), "1 or more"),
        ("config.imitate.batch_size", 0, "1 or more"),
        ("config.imitate.recipe", "icott", "curriculum, frontier, distil, icot"),
        ("config.imitate.icot.tokens_per_epoch", 0, "1 or more"),
        ("config.imitate.icot.tokens_per_epoch", -8, "1 or more"),
        ("config.imitate.icot.all_from", 0, "1 or more"),
        ("config.imitate.icot.offset_decay", 0.0, "above 0"),
        ("config.imitate.lora.alpha", 0.0, "above 0"),
        ("config.dropout.rate", 1.0, "below 1"),
        ("config.dropout.where", "latent", "thought, latents, rollout, all"),
        ("config.cold_start.patience", 0, "1 or more"),
        ("config.cold_start.steps", 0, "1 or more"),
        ("config.cold_start.optimizer.learning_rate", 0.0, "above 0"),
        ("config.cold_start.optimizer.clip_norm", 0.0, "above 0"),
        ("config.evaluate.seeds", 0, "1 or more"),
        ("config.evaluate.thresholds", (7.0,), "from 0 to 1"),
        ("config.evaluate.thresholds", (0.5, 0.05, 0.5), "give each once"),
        ("config.evaluate.datasets", ("same", "same"), "give each once"),
        ("config.evaluate.thresholds", (), "at least one"),
        ("config.evaluate.max_answer_tokens", 0, "1 or more"),
        ("config.data.synthetic.max_value", 5, "6 or more"),
        ("config.data.synthetic.small_share", 1.5, "from 0 to 1"),
        ("config.cpu_devices", 0, "from 1 to"),
        ("config.log_every", 0, "1 or more"),
    ],
)
def test_the_remedy_says_the_range(key, value, said):
    with pytest.raises(UserError) as caught:
        check(_with(key, value))
    assert str(caught.value).startswith(f"{key}: ")
    assert said in str(caught.value)


TOGETHER = {
    "rl.objectives": {"rl.objectives": ("ppo",)},
    "min_latents": dict(min_latents=13),
    "imitate.c_thought": {"imitate.c_thought": 5},
    "gate.enabled": {"gate.enabled": False},
    "cold_start.train_backbone": {"cold_start.train_backbone": True},
    "data.eval": {"data.eval": ConfigDict()},
    "evaluate.datasets": {"evaluate.datasets": ("svamp",)},
    "model.n_embd": {"model.n_head": 5},
    "model.n_kv_head": {"reasoner": "coconut_llama", "model.n_kv_head": 5},
}


def _good_config() -> ConfigDict:
    config = default_config()
    config.data.eval.made = "synthetic:test"
    return config


@pytest.mark.parametrize("key", TOGETHER)
def test_what_spans_several_keys(key):
    config = _good_config()
    check(config)
    for name, value in TOGETHER[key].items():
        _set(config, name, value)
    with pytest.raises(UserError) as caught:
        check(config)
    assert str(caught.value).startswith(f"config.{key}: ")
    assert "\n" not in str(caught.value)


def test_heads_have_pairs_to_rotate():
    config = _good_config()
    config.reasoner = "codi_llama"
    config.model.update(n_embd=30, n_head=10)
    with pytest.raises(UserError, match=r"^config\.model\.n_embd: heads of 3 "):
        check(config)
    config.init = "somewhere"  # whose shapes are its own
    check(config)


# What flags set of `_good_config`, whose rl has 40,000 steps and 2,000 of warm-up, and the warm-ups then.
SHORTENED = {
    "steps of rl": ({"rl.steps": 30}, {"rl": 3}),
    "as many as the warm-up": ({"rl.steps": 2_000}, {"rl": 2_000}),
    "an objective's own": ({"objective.slpo.steps": 200}, {"rl": 20}),
    "a falling rate": ({"rl.steps": 2_000, "rl.optimizer.schedule": "linear"}, {"rl": 199}),
    "a phase": ({"imitate.final_steps": 40, "rl.steps": 6}, {"imitate": 4, "rl": 0}),
    "a later phase, of several to come": ({"imitate.stage_steps": 50}, {"imitate": 5}),
    "a cold start": ({"cold_start.steps": 25}, {"cold_start": 2}),
    "another setting": ({"rl.group": 4}, {"rl": 2_000}),
    "the warm-up itself": ({"rl.steps": 30, "rl.optimizer.warmup_steps": 31}, {"rl": 31}),
    "fewer latents": ({"max_latents": 2, "imitate.c_thought": 0}, {"min_latents": 2}),
}


@pytest.mark.parametrize("case", SHORTENED)
def test_a_warm_up_that_the_user_did_not_name_gives_way_to_a_shorter_run(case):
    (given, expected), config = SHORTENED[case], _good_config()
    config.imitate.optimizer.warmup_steps = config.cold_start.optimizer.warmup_steps = 100
    for name, value in given.items():
        _set(config, name, value)
    found = check(config, given)
    lengths = {name: getattr(found, name).optimizer.warmup_steps for name in ("imitate", "cold_start", "rl")}
    usual = {"imitate": 100, "cold_start": 100, "rl": 2_000, "min_latents": 3}
    assert lengths | {"min_latents": found.min_latents} == usual | expected


@pytest.mark.parametrize("key", ["", "data.", "model.", "imitate.lora.", "cold_start.optimizer."])
def test_unknown_keys_are_errors(key):
    config = default_config()
    for part in key.split(".")[:-1]:
        config = config[part]
    with pytest.raises((AttributeError, KeyError), match="nosuch"):
        config.nosuch = 1


def test_a_further_objective():
    config = _good_config()
    objective_variant(config, "mine", "slpo", passes=2)
    config.rl.objectives = ("mine",)
    assert objective_of(check(config), "mine").passes == 2
    config.objective.mine.passes = 0
    with pytest.raises(UserError, match=r"^config\.objective\.mine\.passes: 0 is not valid; "):
        check(config)


@pytest.mark.parametrize(
    ("name", "node", "said"),
    [
        ("mine", {"kind": "nosuch"}, r"config\.objective\.mine\.kind: 'nosuch' is not valid; give one of slpo, "),
        ("mine", 5, r"config\.objective\.mine: 5 is not valid; give a section with keys of its own"),
        ("mine", {}, r"config\.objective\.mine\.kind: 'mine' is not valid; give one of slpo, "),
        ("mine", {"kind": "slpo", "passess": 3}, r"config\.objective\.mine\.passess: unknown config key; use one of "),
        ("imitate", {"kind": "slpo"}, r"config\.objective\.imitate: a stage or a row of the report has this name"),
        ("a/b", {"kind": "slpo"}, r"config\.objective\.a/b: its name is that of a key and of files"),
        ("a-b", {"kind": "slpo"}, r"config\.objective\.a-b: its name is that of a key and of files"),
    ],
)
def test_a_further_objective_that_is_none(name, node, said):
    config = _good_config()
    config.objective[name] = ConfigDict(node) if isinstance(node, dict) else node
    with pytest.raises(UserError, match=said):
        check(config)
