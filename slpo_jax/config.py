"""Every key of a run's config, its default and its meaning; `configs/*.py` change what they need.

The defaults are the paper's (appendix A) and SPEC section 3's. A key that is not here is an error.
"""

from typing import Any

import numpy as np
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from slpo_jax.checked import section
from slpo_jax.errors import UserError
from slpo_jax.policy.thinkers import THINKERS
from slpo_jax.training.objectives import OBJECTIVES

STAGES = ("imitate", "cold_start", "rl", "evaluate")


def _optimizer(name: str, learning_rate: float, warmup_steps: int = 0, schedule: str = "constant") -> ConfigDict:
    """See `training.optimizer.OptimizerConfig`."""
    return ConfigDict(
        dict(
            name=name,
            learning_rate=learning_rate,
            warmup_steps=warmup_steps,
            schedule=schedule,
            final_fraction=0.0,
            clip_norm=1.0,
            weight_decay=0.0,
            decay_vectors=False,
        )
    )


def default_config() -> ConfigDict:
    """The paper's settings, without data: `configs/` say what to train on."""
    config = ConfigDict()
    config.stages = STAGES  # run in this order
    config.seed = 0  # of initialisation, input order and all noise
    # Where the first weights come from: "" (random), an Orbax checkpoint of this project, a Hugging Face directory or
    # hub id, a torch or safetensors file, or a GGUF file. Then config.model's shapes are the checkpoint's.
    config.init = ""
    config.base = ""  # the base model's directory or hub id, for a file that comes without config and tokenizer
    config.lora_alpha = placeholder(float)  # scale of LoRA adapters in such a file, times their rank (CODI's own: 32)
    config.reasoner = "coconut_gpt2"  # a name in `slpo_jax.origin.recipes.REASONERS`
    config.tokenizer = ""  # "synthetic:LARGEST_NUMBER", a directory or a hub id; "" takes the checkpoint's
    config.model = ConfigDict(
        dict(
            n_layer=12,
            n_head=12,
            n_embd=768,
            n_positions=1024,
            n_inner=0,  # of the feed-forward layer; 0 is 4 * n_embd
            n_kv_head=0,  # Llama; 0 is n_head
            rope_theta=10_000.0,  # Llama
            tied=True,  # the head is the token embedding
            projector=0,  # CODI; 0 is n_embd
            # Of "attention", "mlp" and "embedding"; None is the first two for GPT-2, "mlp" for Llama.
            dropout_sites=placeholder(tuple),
            dtype="float32",  # of activations; "bfloat16" on accelerators
            remat=False,  # recompute activations in the backward pass
            scan_layers=False,  # compile one block for all layers
        )
    )
    config.max_latents = 12  # T
    config.min_latents = 3  # T_min, of the cold start's candidate lengths
    config.prompt_slots = (128, 256)  # P: buckets, one compiled program each
    config.max_answer_tokens = 16  # A, the end-of-sequence token included
    config.dropout = ConfigDict(dict(rate=0.1, where="thought"))  # of rollouts and scoring; see `policy.noise`
    config.thinker = ConfigDict({"name": "latent"} | {name: section(kind) for name, kind in THINKERS.items()})
    config.data = ConfigDict(
        dict(
            train="",
            valid="",
            eval=ConfigDict(),  # NAME = source
            # The synthetic sets: `text.synthetic.SyntheticConfig`.
            synthetic=dict(
                max_value=30,
                max_steps=3,
                train_size=30_000,
                valid_size=500,
                test_size=1_000,
                small_share=0.8,
                puzzle_share=0.2,
                long_puzzle_share=0.1,
                seed=0,
            ),
        )
    )
    # False: no gate, always T latents. hidden: 0 is a linear head. detached: keep its gradient from the latents.
    config.gate = ConfigDict(dict(enabled=True, hidden=0, dropout=0.1, detached=True))
    config.imitate = ConfigDict(
        dict(
            batch_size=128,
            micro_batches=1,  # gradient accumulation
            max_tokens=0,  # leaves out problems whose question, steps and answer are longer; 0 keeps all
            c_thought=2,  # latents that replace one step; 0 is iCoT's no-thought setting
            max_latent_stage=3,  # CODI has no stages, but as many latents as COCONUT's last
            cot_steps=10_000,  # optimizer steps of CoT-SFT; for CODI, of the teacher alone
            stage_steps=5_000,  # of each stage 1 .. max_latent_stage; not for CODI
            final_steps=10_000,  # of the last stage, where all steps have become latents
            final_latents="published",  # c_thought * max_latent_stage, or "random": from a problem's steps to T
            dropout=0.0,  # at every position, while imitating
            # Buckets of written steps and answer (of CODI's whole teacher text), below the one that holds all; each is
            # compiled.
            suffix_slots=(),
            reset_optimizer=True,  # at the beginning of every stage
            control=False,  # also imitate on for as many steps as rl takes, as its control
            # CODI's losses beside the student's, and whether its teacher writes the last step: `training.distil`.
            teacher_factor=1.0,
            distil_factor=20.0,
            last_step=False,
            # rank above 0 trains low-rank adapters of the blocks' kernels, with alpha / rank as their scale, and
            # CODI's projector, instead of the whole reasoner; the stage's checkpoint has them merged.
            lora=dict(rank=0, alpha=32.0),
            optimizer=_optimizer("adamw", 1e-4),
        )
    )
    config.cold_start = ConfigDict(
        dict(
            batch_size=256,
            micro_batches=2,
            steps=20_000,
            trajectories=4,  # N
            train_backbone=False,
            forced_stop=False,  # the law of a stop at T; False is as printed
            evaluate_every=500,  # keeps the gate with the best validation accuracy
            patience=20,  # evaluations without a better one before it stops
            optimizer=_optimizer("adafactor", 1e-4),
        )
    )
    config.rl = ConfigDict(
        dict(
            batch_size=64,  # prompts, over all devices
            micro_batches=1,
            steps=40_000,  # of each objective
            objectives=("slpo",),  # names under config.objective; each is trained from the same start
            group=8,  # G
            temperature=0.0,  # of the answers in training rollouts; 0 is greedy
            stopping="sample",  # Bernoulli(rho_t), or "threshold" (at 0.5)
            # Shares of a prompt's latent and answer slots that scoring has capacity for, ascending to (1, 1): the
            # smallest pair that a batch fits in is used. Speed alone depends on it; each pair is compiled.
            capacities=((0.625, 0.375), (0.75, 0.5), (1.0, 1.0)),
            optimizer=_optimizer("adafactor", 1e-6, warmup_steps=2_000),
        )
    )
    # A further NAME = settings of an objective, with its `kind`: see `run.presets.objective_variant`.
    config.objective = ConfigDict({name: section(settings) for name, settings in OBJECTIVES.items()})
    config.evaluate = ConfigDict(
        dict(
            datasets=placeholder(tuple),  # names under data.eval; None is all
            limit=0,  # problems a set; 0 is all
            batch_size=512,  # rollouts at a time
            # Problems whose prompts fit the same multiple of this (or prompt_slots) share batches; each is compiled.
            prompt_multiple=32,
            samples=16,  # k of Pass@k; 0 for Acc alone
            seeds=3,
            max_answer_tokens=placeholder(int),  # None: as config.max_answer_tokens
            thresholds=(0.5, 0.6, 0.7, 0.8, 0.9),  # swept on the validation split
            save_latents=False,
            # Workdir of another run, whose rows the report also has: those that this run has none of its own of. They
            # must have been evaluated on the same problems, with as many samples and answer tokens.
            rows_from="",
        )
    )
    config.log_every = 10
    config.checkpoint_every = 500
    config.cpu_devices = 1  # shards of the batch where there is no accelerator; the results don't depend on it
    config.lock()  # a misspelt key in a config file is an error too
    config.data.eval.unlock()
    config.objective.unlock()
    return config


def own_latents(config: ConfigDict) -> int:
    """The number of latents that imitation ends with, which is the reasoner's own without a gate."""
    return min(config.max_latents, max(1, config.imitate.c_thought * config.imitate.max_latent_stage))


def check(config: ConfigDict) -> None:
    """Fail early on values that no stage could use.

    Raises:
        UserError: one line with the key and the remedy.
    """

    def need(ok, message):
        if not ok:
            raise UserError(f"config.{message}")

    unknown = [stage for stage in config.stages if stage not in STAGES]
    need(config.stages and not unknown, f"stages: {unknown or 'none given'}; choose from {', '.join(STAGES)}")
    need(config.max_latents >= 0, "max_latents: give a number of latents, or 0 for explicit text alone")
    need(
        config.max_latents > 0 or not config.gate.enabled,
        "gate.enabled: with max_latents=0 there is nothing to stop; set it to False",
    )
    need(
        1 <= config.min_latents <= max(config.max_latents, 1),
        f"min_latents: {config.min_latents} is not within 1..max_latents ({config.max_latents}); lower it",
    )
    need(config.max_answer_tokens >= 1, "max_answer_tokens: give at least 1")
    need(
        len(config.prompt_slots) > 0 and min(config.prompt_slots) >= 1,
        "prompt_slots: give at least one bucket of 1 or more, e.g. (128,)",
    )
    need(0.0 <= config.dropout.rate < 1.0, f"dropout.rate: {config.dropout.rate} is not within [0, 1)")
    need(config.dropout.where in ("thought", "latents", "all"), "dropout.where: use thought, latents or all")
    need(
        config.init or config.model.n_embd % config.model.n_head == 0,
        "model.n_embd: must be a multiple of model.n_head",
    )
    need(config.model.dtype in ("float32", "bfloat16"), "model.dtype: use float32 or bfloat16")
    need(config.imitate.final_latents in ("published", "random"), "imitate.final_latents: use published or random")
    need(config.imitate.max_tokens >= 0, "imitate.max_tokens: give a number of tokens, or 0 to keep all problems")
    need(config.imitate.lora.rank >= 0, "imitate.lora.rank: give 1 or more, or 0 to train all parameters")
    need(
        not (config.imitate.lora.rank and config.imitate.control),
        "imitate.control: goes on with all parameters, but imitate.lora.rank trains adapters; set one of them to 0",
    )
    own = config.imitate.c_thought * config.imitate.max_latent_stage
    need(
        "imitate" not in config.stages or own <= config.max_latents,
        f"imitate.c_thought: {own} latents in the last stage are more than max_latents ({config.max_latents})",
    )
    need(config.rl.group >= 2, f"rl.group: G = {config.rl.group} gives no baseline; use 2 or more")
    need(
        _ascends_to_one(config.rl.capacities),
        f"rl.capacities: {config.rl.capacities} are not pairs of shares that ascend to (1, 1), e.g. "
        "((0.5, 0.5), (1, 1))",
    )
    need(config.rl.stopping in ("sample", "threshold"), "rl.stopping: use sample or threshold")
    need(
        config.thinker.name in THINKERS,
        f"thinker.name: {config.thinker.name!r} is unknown; use one of {', '.join(THINKERS)}",
    )
    need(
        config.gate.enabled or "cold_start" not in config.stages,
        "gate.enabled: False leaves the cold_start stage nothing to train; take it out of config.stages",
    )
    need(
        not (config.cold_start.train_backbone and config.gate.detached),
        "cold_start.train_backbone: the gate's gradient reaches the backbone only with config.gate.detached=False",
    )
    for key in ("log_every", "checkpoint_every", "cpu_devices", "cold_start.evaluate_every", "cold_start.trajectories",
                "evaluate.batch_size", "evaluate.prompt_multiple", *(f"{stage}.{name}" for stage in STAGES[:3]
                                         for name in ("batch_size", "micro_batches"))):  # fmt: skip
        section, _, name = key.rpartition(".")
        need((config[section] if section else config)[name] >= 1, f"{key}: give at least 1")
    need(len(config.evaluate.thresholds) > 0, "evaluate.thresholds: give at least one, e.g. (0.5,)")
    need("evaluate" not in config.stages or len(config.data.eval) > 0, "data.eval: no sets; add NAME = source to it")
    for name in config.evaluate.datasets or ():
        need(name in config.data.eval, f"evaluate.datasets: {name!r} is not under config.data.eval")


def _ascends_to_one(rooms: Any) -> bool:
    """Whether these are pairs of positive numbers, none smaller than the one before, of which the last is (1, 1)."""
    try:
        shares = np.array([(0, 0), *rooms], float)
    except (TypeError, ValueError):
        return False
    return shares.shape[1:] == (2,) and bool(
        (shares[1:] > 0).all() and (np.diff(shares, axis=0) >= 0).all() and (shares[-1] == 1).all()
    )
