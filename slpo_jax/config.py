"""Every key of a run's config; `configs/*.py` change what they need.

A section is the dataclass that it fills, which has its keys, defaults and ranges: `Config` below names them all.

    config.model               models/shapes.py          ModelConfig
    config.dropout             policy/noise.py           DropoutConfig
    config.gate                models/gate.py            GateConfig
    config.data                text/problems.py          DataConfig
    config.data.synthetic      text/synthetic.py         SyntheticConfig
    config.imitate             training/imitate.py       ImitateConfig
    config.imitate.lora        models/lora.py            LoraConfig
    config.cold_start          training/cold_start.py    ColdStartConfig
    config.evaluate            evaluation/settings.py    EvaluateConfig
    config.STAGE.optimizer     training/optimizer.py     OptimizerConfig

The defaults are the paper's (appendix A), or ours where it leaves a choice open. An unknown key is an error.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from ml_collections import ConfigDict

from slpo_jax.checked import FieldError, check_fields, fill, section, setting
from slpo_jax.errors import UserError
from slpo_jax.evaluation.settings import EvaluateConfig
from slpo_jax.models.gate import GateConfig
from slpo_jax.models.shapes import ModelConfig
from slpo_jax.policy.noise import DropoutConfig
from slpo_jax.text.problems import DataConfig
from slpo_jax.training.cold_start import ColdStartConfig
from slpo_jax.training.imitate import ImitateConfig
from slpo_jax.training.optimizer import OptimizerConfig

Stage = Literal["imitate", "cold_start", "slpo", "evaluate"]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class Config:
    """A whole run.

    Attributes:
        stages: what is run, in this order.
        seed: of initialisation, input order and all noise.
        init: where the first weights come from: "" (random), an Orbax checkpoint of this project, a Hugging Face
            directory or hub id, a torch or safetensors file, or a GGUF file. Then config.model's shapes are the
            checkpoint's.
        base: the base model's directory or hub id, for a file that comes without config and tokenizer.
        lora_alpha: scale of LoRA adapters in such a file, times their rank (CODI's own: 32).
        reasoner: a name in `slpo_jax.origin.recipes.REASONERS`.
        tokenizer: "synthetic:LARGEST_NUMBER", a directory or a hub id; "" takes the checkpoint's.
        model: shapes.
        max_latents: T.
        min_latents: T_min, of the cold start's candidate lengths.
        prompt_slots: P: buckets, one compiled program each.
        max_answer_tokens: A, the end-of-sequence token included.
        dropout: of rollouts and scoring.
        data: what to train on, and to evaluate on.
        gate: the stopping gate.
        imitate: the stage imitate.
        cold_start: the stage cold_start.
        evaluate: the stage evaluate, and validation in the others.
        log_every: steps between rows of metrics.jsonl.
        checkpoint_every: steps between checkpoints.
        cpu_devices: shards of the batch where there is no accelerator; the results don't depend on it.
    """

    stages: tuple[Stage, ...] = setting(STAGES, fewest=1)
    seed: int = setting(0, least=0, most=2**32 - 1)  # jax leaves out the bits beyond
    init: str = ""
    base: str = ""
    lora_alpha: float | None = setting(None, above=0)
    reasoner: str = "coconut_gpt2"
    tokenizer: str = ""
    model: ModelConfig = ModelConfig()
    max_latents: int = setting(12, least=1)
    min_latents: int = setting(3, least=1)
    prompt_slots: tuple[int, ...] = setting((128, 256), least=1, fewest=1)
    max_answer_tokens: int = setting(16, least=1)
    dropout: DropoutConfig = DropoutConfig()
    data: DataConfig = DataConfig()
    gate: GateConfig = GateConfig()
    imitate: ImitateConfig = ImitateConfig()
    cold_start: ColdStartConfig = ColdStartConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    log_every: int = setting(10, least=1)
    checkpoint_every: int = setting(500, least=1)
    cpu_devices: int = setting(1, least=1, most=1024)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.min_latents > self.max_latents:
            raise FieldError(self, "min_latents", f"it is more than max_latents ({self.max_latents}); lower it")


def default_config() -> ConfigDict:
    """The paper's settings, without data: `configs/` say what to train on."""
    config = section(Config)
    config.slpo = _slpo()
    config.lock()  # a misspelt key in a config file is an error too
    config.data.eval.unlock()
    return config


def _slpo() -> ConfigDict:
    return ConfigDict(
        dict(
            batch_size=64,  # prompts, over all devices
            micro_batches=1,
            steps=40_000,
            group=8,  # G
            passes=4,  # K
            advantage="rloo",  # or "grpo"
            temperature=0.0,  # of the answers in training rollouts; 0 is greedy
            stopping="sample",  # Bernoulli(rho_t), or "threshold" (at 0.5)
            answer_passes="mean",  # log-likelihood of the answer: mean over the K passes, or one "clean" pass
            # Shares of a prompt's latent and answer slots that scoring has room for, ascending to (1, 1): the smallest
            # pair that a batch fits in is used. Speed alone depends on it; each pair is compiled.
            rooms=((0.625, 0.375), (0.75, 0.5), (1.0, 1.0)),
            # `policy.objective.ObjectiveConfig`.
            objective=dict(
                latent_reduction="sum",
                latent_weight=1.0,
                answer_weight=1.0,
                stop_weight=1.0,
                detach_variance=False,
                forced_stop=True,
                epsilon=1e-6,
            ),
            optimizer=section(OptimizerConfig("adafactor", 1e-6, 2_000)),
        )
    )


def own_latents(config: ConfigDict) -> int:
    """The number of latents that imitation ends with, which is the reasoner's own without a gate."""
    return min(config.max_latents, max(1, config.imitate.c_thought * config.imitate.max_latent_stage))


def check(config: ConfigDict) -> None:
    """Fail early on values that no stage could use: each section's own, then what spans several.
    Raises:
        UserError: one line with the key and the remedy.
    """
    settings = fill(Config, config)

    def need(ok, message):
        if not ok:
            raise UserError(f"config.{message}")

    _check_model(settings, need)
    _check_slpo(config, need)
    own = settings.imitate.c_thought * settings.imitate.max_latent_stage
    need(
        "imitate" not in settings.stages or own <= settings.max_latents,
        f"imitate.c_thought: {own} latents in the last stage are more than max_latents ({settings.max_latents})",
    )
    need(
        settings.gate.enabled or "cold_start" not in settings.stages,
        "gate.enabled: False leaves the cold_start stage nothing to train; take it out of config.stages",
    )
    need(
        not (settings.cold_start.train_backbone and settings.gate.detached),
        "cold_start.train_backbone: the gate's gradient reaches the backbone only with config.gate.detached=False",
    )
    for stage in ("cold_start", "slpo"):
        if stage in settings.stages:
            fill(OptimizerConfig, config[stage].optimizer, f"config.{stage}.optimizer", total_steps=config[stage].steps)
    sets = settings.data.eval
    need("evaluate" not in settings.stages or sets, "data.eval: no sets; add NAME = source to it")
    for name in settings.evaluate.datasets or ():
        need(name in sets, f"evaluate.datasets: {name!r} is not under config.data.eval; it has {', '.join(sets)}")


def _check_model(settings: Config, need: Any) -> None:
    """What only random weights need: a checkpoint brings shapes of its own."""
    model, llama = settings.model, settings.reasoner.endswith("llama")
    if settings.init:
        return
    need(
        model.n_embd % model.n_head == 0,
        f"model.n_embd: {model.n_embd} is not a multiple of model.n_head ({model.n_head}); change one of them",
    )
    need(
        not llama or model.n_head % (model.n_kv_head or model.n_head) == 0,
        f"model.n_kv_head: {model.n_kv_head} does not divide model.n_head ({model.n_head}); use one that does",
    )
    need(
        not llama or model.n_embd // model.n_head % 2 == 0,
        f"model.n_embd: heads of {model.n_embd // model.n_head} have no pairs to rotate; use an even multiple of "
        f"model.n_head ({model.n_head})",
    )


def _check_slpo(config: ConfigDict, need: Any) -> None:
    need(config.slpo.group >= 2, f"slpo.group: G = {config.slpo.group} gives no baseline; use 2 or more")
    need(config.slpo.passes >= 1, "slpo.passes: K must be 1 or more")
    need(config.slpo.advantage in ("rloo", "grpo"), "slpo.advantage: use rloo or grpo")
    need(config.slpo.answer_passes in ("mean", "clean"), "slpo.answer_passes: use mean or clean")
    need(
        _ascends_to_one(config.slpo.rooms),
        f"slpo.rooms: {config.slpo.rooms} are not pairs of shares that ascend to (1, 1), e.g. ((0.5, 0.5), (1, 1))",
    )
    need(config.slpo.stopping in ("sample", "threshold"), "slpo.stopping: use sample or threshold")
    need(config.slpo.objective.latent_reduction in ("sum", "mean"), "slpo.objective.latent_reduction: use sum or mean")
    for name in ("batch_size", "micro_batches"):
        need(config.slpo[name] >= 1, f"slpo.{name}: give at least 1")


def _ascends_to_one(rooms: Any) -> bool:
    """Whether these are pairs of positive numbers, none smaller than the one before, of which the last is (1, 1)."""
    try:
        shares = np.array([(0, 0), *rooms], float)
    except (TypeError, ValueError):
        return False
    return shares.shape[1:] == (2,) and bool(
        (shares[1:] > 0).all() and (np.diff(shares, axis=0) >= 0).all() and (shares[-1] == 1).all()
    )
