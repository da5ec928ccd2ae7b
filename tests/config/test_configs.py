"""Every file in configs/: it loads, passes the checks, and says what was published."""

import importlib

import pytest

import arena
import chains
import countdown
import quickstart
import soft_quickstart
import twelve
from configs._presets import GSM8K_AUG, SOFT_METHODS
from slpo_jax.architectures import REASONERS
from slpo_jax.cli.train import smoke
from slpo_jax.config.config import default_config, own_latents, read_config
from slpo_jax.config.config_checks import check
from slpo_jax.config.overrides import merge_settings
from slpo_jax.config.registry import list_shipped
from slpo_jax.errors import UserError
from slpo_jax.io.files import flatten
from slpo_jax.training.optimizer import OptimizerConfig

NAMES = sorted(list_shipped())
GPT2 = "openai-community/gpt2"
LLAMA = "meta-llama/Llama-3.2-1B-Instruct"
STARTS = {
    "coconut_gpt2": ("coconut_gpt2", "ModalityDance/latent-tts-coconut", ""),
    "codi_gpt2": ("codi_gpt2", "zen-E/CODI-gpt2", GPT2),
    "coconut_llama1b": ("coconut_llama", "", LLAMA),
    "codi_llama1b": ("codi_llama", "zen-E/CODI-llama3.2-1b-Instruct", LLAMA),
}
PAPER = {
    "max_latents": 12, "min_latents": 3, "dropout.rate": 0.1, "dropout.where": "thought", "gate.dropout": 0.1,
    "stages": ("cold_start", "rl", "evaluate"), "tokenizer": "",
    "cold_start.trajectories": 4, "cold_start.batch_size": 256, "cold_start.steps": -(-15 * 385_620 // 256),
    "cold_start.evaluate_every": 500, "cold_start.patience": 20, "cold_start.train_backbone": False,
    "cold_start.optimizer.name": "adafactor", "cold_start.optimizer.learning_rate": 1e-4,
    "rl.group": 8, "objective.slpo.passes": 4, "objective.slpo.advantage": "rloo", "rl.batch_size": 64,
    "rl.steps": 40_000, "rl.objectives": ("slpo",),
    "rl.optimizer.name": "adafactor", "rl.optimizer.learning_rate": 1e-6, "rl.optimizer.warmup_steps": 2_000,
    "rl.optimizer.schedule": "constant", "evaluate.samples": 16, "evaluate.seeds": 3, "model.dtype": "auto",
    "data.train": "here/train.txt", "objective": default_config().objective.to_dict(),
    "data.eval": {"gsm8k": "here/gsm_test.json", "gsm_hard": "here/gsm_hard.json",
                  "multiarith": "here/multiarith.json"},
}  # fmt: skip
SMALL = {"cold_start.micro_batches": 2, "model.remat": False, "model.scan_layers": None}
LARGE = {"cold_start.micro_batches": 8, "model.remat": True, "model.scan_layers": True}
EPOCH = -(-385_620 // 128)
COCONUT = {
    "c_thought": 2, "max_latent_stage": 3, "cot_steps": 25 * EPOCH, "stage_steps": 3 * EPOCH, "final_steps": 13 * EPOCH,
    "final_latents": "published", "lora.rank": 0, "max_tokens": 0, "optimizer.learning_rate": 1e-4,
    "optimizer.weight_decay": 0.01, "optimizer.decay_vectors": True, "optimizer.clip_norm": None,
    "optimizer.schedule": "constant", "optimizer.warmup_steps": 0, "reset_optimizer": True,
}  # fmt: skip
CODI = {
    "c_thought": 2, "max_latent_stage": 3, "cot_steps": 0, "final_latents": "published", "distil.teacher_factor": 1.0,
    "distil.last_step": False, "lora.rank": 128, "lora.alpha": 32.0, "optimizer.weight_decay": 0.1,
    "optimizer.clip_norm": 2.0,
    "optimizer.decay_vectors": False,
}  # fmt: skip


def _warm_up(epochs: int) -> int:
    return -(-3 * epochs * EPOCH // 100)


IMITATE = {
    "coconut_gpt2": COCONUT | {"dropout": 0.1},
    "coconut_llama1b": COCONUT | {"dropout": 0.0},
    "codi_gpt2": CODI | {
        "final_steps": 40 * EPOCH, "optimizer.warmup_steps": _warm_up(40), "optimizer.learning_rate": 3e-3,
        "distil.distil_factor": 1.0, "max_tokens": 1_000, "dropout": 0.1, "micro_batches": 2,
    },
    "codi_llama1b": CODI | {
        "final_steps": 10 * EPOCH, "optimizer.warmup_steps": _warm_up(10), "optimizer.learning_rate": 8e-4,
        "distil.distil_factor": 20.0, "max_tokens": 200, "dropout": 0.0, "micro_batches": 4,
    },
}  # fmt: skip


def _load(name: str, *arguments: str):
    try:
        return importlib.import_module(name).get_config(*arguments)
    except UserError as error:
        if "pip install" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("name", NAMES)
def test_every_config_can_be_run(name):
    config = _load(name)
    check(config)
    assert config.reasoner in REASONERS
    for stage in ("imitate", "cold_start", "rl"):
        merge_settings(
            OptimizerConfig(total_steps=config[stage].get("steps", 1 << 20)),
            config[stage].optimizer,
        )
    assert config.stages == ("evaluate",) or (config.data.train, config.data.valid) != (
        "",
        "",
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_config_can_be_smoked(name):
    config = merge_settings(
        read_config(_load(name)), {"rl.steps": 3_000_000}
    )  # of a flag, which is cut as well
    settings, line = smoke(config)
    check(settings)
    own = settings.imitate
    judged = [settings.objective[name] for name in settings.rl.objectives]
    steps = [
        own.cot_steps,
        own.stage_steps,
        own.final_steps,
        settings.cold_start.steps,
        settings.rl.steps,
    ]
    assert max([*steps, *(each.steps or 0 for each in judged)]) <= 2
    assert max(own.batch_size, settings.cold_start.batch_size) <= 8
    assert not any(settings.rl.batch_size % each.minibatches for each in judged)
    assert (
        settings.evaluate.limit,
        settings.evaluate.samples <= 2,
        len(settings.prompt_slots),
    ) == (8, True, 1)
    assert settings.stages == config.stages
    assert line.startswith(
        "--smoke: 2 steps of each phase and objective, 8 problems of each set; nothing is learned by it"
    )


ANSWERS = {
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 50,
}  # of rollouts in both: there it is one generate()
COLAR = {
    "imitate": {"lora.rank": 128, "lora.alpha": 32.0, "lora.kernels": ("q_proj", "v_proj"), "optimizer.name": "adamw",
                "optimizer.learning_rate": 1e-4, "optimizer.weight_decay": 0.01, "optimizer.clip_norm": None},
    # Of clip_norm 1, of a loss divided by 32.
    "rl": ANSWERS | {"batch_size": 512, "group": 8, "optimizer.learning_rate": 1e-6, "optimizer.clip_norm": 32.0},
    "objective.grpo": {"minibatches": 512, "reduction": "sum", "advantage": "grpo", "clip": 0.2},
    "latent_policy.colar.least": 1, "max_latents": 64, "max_answer_tokens": 16, "evaluate": ANSWERS | {"samples": 5},
}  # fmt: skip
SIMCOT = {
    "recipe": "simcot",
    "dropout": 0.1,
    "optimizer.name": "adamw",
    "simcot.weight": 1.0,
}
SHORTER = -(-385_620 // 64)
SFT_EPOCH = -(-GSM8K_AUG // 512)  # the first of 8 problems on each of 8 devices
# By config and argument, its keys.
PUBLISHED = {
    **{(name, ""): {"imitate": {"batch_size": 128, "optimizer.name": "adamw"} | own} for name, own in IMITATE.items()},
    **{(name, "here"): PAPER | (SMALL if name.endswith("gpt2") else LARGE) | {
        "reasoner": reasoner, "init": init, "base": base} for name, (reasoner, init, base) in STARTS.items()},
    ("colar_llama1b", "colar"): COLAR | {
        "prompt.speed": 2, "imitate.recipe": "colar", "imitate.batch_size": 256,
        "imitate.final_steps": 50 * -(-385_620 // 256)},
    ("colar_llama1b", "regular"): COLAR | {
        "prompt.speed": 1, "imitate.recipe": "regular", "imitate.batch_size": 128, "imitate.final_steps": 100 * EPOCH},
    **{("adalr_llama1b", which): {
        "imitate": {
            "batch_size": 128, "final_steps": 30_000, "adalr.distil_factor": 20.0, "adalr.teacher_factor": 1.0,
            "adalr.last_step": False, "adalr.most": 10, "adalr.latents": latents, "adalr.latents_a_step": a_step,
            "lora.rank": 128, "lora.alpha": 32.0, "optimizer.learning_rate": 8e-4, "optimizer.schedule": "cosine",
            "optimizer.warmup_steps": 900, "optimizer.weight_decay": 0.1, "optimizer.clip_norm": 2.0},
        "rl": {"batch_size": 8, "group": 16, "steps": 60_000, "lora.rank": 32, "optimizer.learning_rate": 1e-5,
               "optimizer.warmup_steps": 1000},
        "objective.grpo.kl_weight": 1e-3, "latent_policy.name": "adalr", "gate.enabled": False,
    } for which, latents, a_step in (("latent_6", 6, 0), ("latent_6_by_1", 5, 1))},
    ("simcot_gpt2", "coconut"): {"imitate": SIMCOT | {  # epochs 3 to 34, counted from 0
        "c_thought": 2, "max_latent_stage": 5, "cot_steps": 0, "batch_size": 64, "stage_steps": 3 * SHORTER,
        "final_steps": (32 - 5 * 3) * SHORTER, "optimizer.learning_rate": 1e-4, "lora.rank": 0}},
    ("simcot_gpt2", "codi"): {"imitate": SIMCOT | {
        "batch_size": 128, "lora.rank": 128, "lora.alpha": 32.0, "final_steps": 40 * EPOCH,
        "distil.distil_factor": 1.0, "optimizer.learning_rate": 3e-3, "optimizer.schedule": "cosine",
        "optimizer.warmup_steps": _warm_up(40), "optimizer.weight_decay": 0.1, "optimizer.clip_norm": 2.0,
        "c_thought": 2, "max_latent_stage": 3}},
    ("soft_llama1b", "latent_sft"): {
        "imitate": {
            "recipe": "latent_sft", "latent_sft.ratio": 2, "latent_sft.top_k": 10, "lora.rank": 64, "lora.alpha": 128.0,
            "stage_steps": 10 * SFT_EPOCH, "final_steps": 70 * SFT_EPOCH, "optimizer.learning_rate": 1e-4,
            "latent_sft.final_learning_rate": 3e-4},
        "evaluate.temperature": 0.6, "evaluate.top_p": 0.95, "max_latents": 128,
        "latent_policy.soft": {"temperature": 1.0, "top_k": 10, "top_p": 1.0}},
    ("soft_llama1b", "latent_grpo"): {
        "latent_policy.name": "gumbel_top_k",
        "rl": {"objectives": ("latent_grpo",), "batch_size": 64, "group": 8, "temperature": 0.6, "top_p": 0.95,
               "top_k": 30, "dynamic_batches": 50, "steps": 10 * GSM8K_AUG // 64},
        "objective.latent_grpo": {
            "updates": 1, "minibatches": 4, "clip": 0.2, "dual_clip": 3.0, "kl_weight": 0.0, "learning_rate": 1e-6,
            "reduction": "token_mean", "first_choice": "best", "tempered": True},
        "latent_policy.gumbel_top_k": {
            "top_k": 0, "top_p": 0.95, "least": 10, "most": 10, "tau": 1.0, "down": 1.5, "up": 3.0, "shift": 1.5,
            "likelihood": "signed"}},
}  # fmt: skip


@pytest.mark.parametrize(("name", "argument"), PUBLISHED)
def test_published_training(name, argument):
    config = _load(name, *[argument] * bool(argument))
    check(config)
    published = flatten(PUBLISHED[name, argument])
    found = flatten(config.to_dict())
    assert {key: found[key] for key in published} == published


TUNED = ("", ",tune")
CELLS = {
    twelve: [
        reasoner + kind for reasoner in twelve.CHOSEN for kind in (*TUNED, ",falling")
    ],
    arena: [
        f"{method}_{on}{kind}"
        for method in arena.REASONERS
        for on in ("gpt2", "llama")
        for kind in TUNED
    ],
    countdown: [
        f"{name}_{on}{kind}"
        for name in countdown.REASONERS
        for on in ("gpt2", "llama")
        for kind in TUNED
    ],
    quickstart: [
        "",
        "tune",
        *(cell + kind for cell in ("all", "no_latents", "cot") for kind in TUNED),
    ],
    chains: list(chains.REASONERS),
    soft_quickstart: [
        method + kind for method in soft_quickstart.METHODS for kind in TUNED
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "another"),
    [
        (twelve, "codi_gpt2,luck"),
        (arena, "luck_gpt2"),
        (chains, "luck"),
        (countdown, "codi_luck"),
        (quickstart, "luck"),
        (soft_quickstart, "lepo,tun"),
    ],
)
def test_cells_of_a_table_of_results(module, another):
    """Each is a config of its own, and those that tune see no test set."""
    for cell in CELLS[module]:
        config = module.get_config(cell)
        check(config)
        assert (set(config.data.eval) == {"valid"}) == cell.endswith("tune"), cell
    with pytest.raises(UserError, match=rf"{module.__name__}\.py:{another}: "):
        module.get_config(another)


@pytest.mark.parametrize("cell", CELLS[arena])
def test_the_arena_s_cells_take_their_steps(cell):
    """In whole shares."""
    name = cell.rpartition("_")[0]
    imitate = arena.get_config(cell).imitate
    count = 3 if imitate.recipe == "latent_sft" else imitate.max_latent_stage
    stages = imitate.stage_steps * count if name != "icot" and imitate.cot_steps else 0
    assert (
        0
        <= arena.REASONERS[name][2] - (imitate.cot_steps + stages + imitate.final_steps)
        < 10
    )


@pytest.mark.parametrize(
    ("name", "kind"), [("soft_llama3b", "text_llama"), ("soft_qwen7b", "text_qwen2")]
)
@pytest.mark.parametrize("method", ["slpo", "grpo", "soft_grpo"])
def test_adapters_for_so_many_cards(name, kind, method):
    """Of rank 32, a prompt a device at a time in each update; all else is the method's own."""
    whole = _load("soft_llama3b", method)
    for cards in (1, 4):
        config = _load(name, f"{method},{cards}")
        check(config)
        assert (config.rl.lora.rank, config.sharding.fsdp) == (32, cards)
        updates = 2 if method == "soft_grpo" else 1
        assert (
            config.rl.batch_size
            == config.rl.micro_batches * cards * updates
            == whole.rl.batch_size
        )
        assert config.objective[method] == whole.objective[method]
        assert (config.max_answer_tokens, config.reasoner) == (2048, kind)
    for cards in ("5", "0", "four"):
        with pytest.raises(UserError, match=f"'{cards}' .*{whole.rl.batch_size}"):
            _load(name, f"{method},{cards}")


@pytest.mark.parametrize("name", ["soft_llama1b", "soft_llama3b", "soft_smollm2"])
def test_methods_of_the_paper_s_second_half(name):
    """What METHODS' sources publish: the block of 32, rates, K = 2 and 8 scored latents, sampling."""
    found = {}
    for method in SOFT_METHODS:
        config = found[method] = _load(name, method)
        check(config)
        assert config.reasoner == "text_llama"
        assert ("rl" in config.stages) == (method not in ("cot", "latent"))
    rates = {
        method: config.objective[method].learning_rate
        for method, config in found.items()
        if "rl" in config.stages
    }
    assert rates == {"grpo": 1e-6, "lepo": 1e-6, "soft_tokens": 6e-6, "hrpo": 5e-6, "slpo": 1e-6, "pathwise": 1e-6,
                     "soft_grpo": 1e-6}  # fmt: skip
    assert [
        found[method].max_latents
        for method in ("cot", "grpo", "latent", "lepo", "slpo")
    ] == [0, 0, 32, 32, 32]
    assert (
        found["slpo"].objective.slpo.passes,
        found["slpo"].objective.slpo.scored_latents,
    ) == (2, 8)
    assert {
        config.dropout.rate for method, config in found.items() if method != "slpo"
    } == {0.0}
    assert (
        found["grpo"].rl.temperature,
        found["grpo"].rl.top_k,
        found["grpo"].rl.top_p,
    ) == (1.0, 30, 0.95)
    with pytest.raises(UserError, match=r"'luck'.*cot, latent, "):
        _load(name, "luck")


def test_methods_of_soft_tokens_start_alike():
    """Imitation knows nothing of what comes after."""
    module = soft_quickstart
    lepo = soft_quickstart.get_config("lepo")
    for name in module.METHODS:
        config = module.get_config(name)
        if name in module.AFTER_LATENT_SFT:
            assert (
                own_latents(read_config(config)) == config.max_latents == module.CHUNKS
            )
            continue
        assert config.imitate == lepo.imitate
        assert config.rl.optimizer == lepo.rl.optimizer
        assert config.max_latents == {"grpo": 0, "hrpo": module.WORDS}.get(
            name, module.SOFT_TOKENS
        )
        assert config.rl.objectives == (name,) or (
            name == "cot" and "rl" not in config.stages
        )
        if name in (
            "grpo",
            "lepo",
            "hrpo",
        ):  # as published: stored inputs, a mean within each rollout first
            tuned = module.get_config(f"{name},tune")
            for node in [
                config.objective[name],
                *(tuned.objective[n] for n in tuned.rl.objectives),
            ]:
                assert (node.reduction, node.detach_inputs) == (
                    "sequence_mean",
                    name == "lepo",
                )
