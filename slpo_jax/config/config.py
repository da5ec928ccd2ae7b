"""Every key of a run's config; `configs/*.py` change what they need.

A section is the dataclass that it fills, which has its keys, defaults and ranges: `Config` below names them all.

    config.model               models/reasoner.py        ModelConfig
    config.dropout             policy/noise.py           DropoutConfig
    config.latent_policy       policy/latent_policies/   LatentPolicyConfig
    config.prompt              data/chat.py              PromptConfig
    config.gate                models/gate.py            GateConfig
    config.data                data/problems.py          DataConfig
    config.data.fields         data/record_fields.py     FieldsConfig
    config.data.TASK           data/generated.py         GENERATED
    config.data.gym            data/generated_sets.py    GymConfig
    config.imitate             training/recipes/         ImitateSettings
    config.imitate.NAME        training/recipes/         RECIPES[NAME]
    config.imitate.lora        models/lora.py            LoraConfig
    config.cold_start          training/gate_training.py ColdStartConfig
    config.best_of_n           training/rejection_sampling.py BestOfNConfig
    config.rl                  training/rl_config.py     RlConfig
    config.latent_rm           training/latent_rm_loss.py LatentRmConfig
    config.objective.NAME      training/objectives/      OBJECTIVES[NAME]
    config.evaluate            evaluation/evaluator.py   EvaluateConfig
    config.STAGE.optimizer     training/optimizer.py     OptimizerConfig
    config.sharding            runtime/mesh.py           ShardingConfig

The defaults are the paper's (appendix A), or ours where it leaves a choice open. An unknown key is an error. The
defaults, a config file's ConfigDict, flags and what is chosen by the data are layers, which `merge_settings` merges
into the frozen `Config` that a run goes by.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ml_collections import ConfigDict

from slpo_jax.architectures import architecture_of
from slpo_jax.config.overrides import merge_settings, section
from slpo_jax.data.chat import PromptConfig
from slpo_jax.data.generated import task_reward
from slpo_jax.data.problems import DataConfig
from slpo_jax.errors import UserError
from slpo_jax.evaluation.evaluator import EvaluateConfig
from slpo_jax.models.gate import GateConfig
from slpo_jax.models.reasoner import ModelConfig
from slpo_jax.policy.latent_policies import LatentPolicyConfig, latent_policy_config
from slpo_jax.policy.noise import DropoutConfig
from slpo_jax.rewards.functions import code_of
from slpo_jax.rewards.reward import REWARDS
from slpo_jax.runtime.mesh import ShardingConfig
from slpo_jax.settings import FieldError, check_fields, setting
from slpo_jax.stages import IMITATE, NO_THOUGHT, RL, USUAL, Section, section_of
from slpo_jax.training.gate_training import ColdStartConfig
from slpo_jax.training.latent_rm_loss import LatentRmConfig
from slpo_jax.training.objectives import OBJECTIVES, OPTIMIZER_KEYS, Objective
from slpo_jax.training.recipes import ImitateSettings, imitate_config
from slpo_jax.training.rejection_sampling import BestOfNConfig
from slpo_jax.training.rl_config import RlConfig


def _entry(
    key: str, old: Objective | None, changes: Sequence[tuple[str, Any]]
) -> Objective | None:
    """Return the objective that an entry of `config.objective` changes: another one where its kind is another."""
    # The last change that says or implies a kind decides.
    kind = None
    for below, value in changes:
        if below == "kind":
            kind = value
        elif not below and isinstance(value, Mapping):
            kind = value.get("kind", kind or (old.kind if old else ""))
    if kind is None:
        return old
    kind = kind or key.rpartition(".")[2]
    if kind not in OBJECTIVES:
        raise UserError(
            f"{key}.kind", f"{kind!r} is not valid; give one of {', '.join(OBJECTIVES)}"
        )
    # An objective of another kind begins with its own defaults.
    if type(old) is OBJECTIVES[kind]:
        return old
    return OBJECTIVES[kind]()


def _default_objectives() -> dict[str, Objective]:
    return {name: kind() for name, kind in OBJECTIVES.items()}


@dataclass(frozen=True)
class Config:
    """A whole run.

    Attributes:
        stages: the stages to run, in this order.
        seed: seed of initialisation, input order and all noise.
        init: where the first weights come from, see docs/use.md; "" is random. Then config.model's shapes are the
            checkpoint's.
        base: the base model's directory or hub id, for what comes without config and tokenizer, or is adapters alone.
        lora_alpha: scale of the LoRA adapters in what `init` or `base` names, times their rank (CODI's own: 32).
        reasoner: architecture and backbone, such as codi_llama; docs/methods.md has both.
        tokenizer: "synthetic:LARGEST_NUMBER", "graph:NODES", "nodes:LARGEST_NODE", "bytes", "words" (of the training
            data), a directory or a hub id; "" takes the checkpoint's.
        model: shapes.
        prompt: the text that asks a reasoner without markers.
        max_latents: T, the most latents of a thought; 0 is explicit text alone.
        min_latents: T_min, the least of the cold start's candidate lengths.
        prompt_slots: P: length buckets of prompts, one compiled program each.
        max_answer_tokens: A, the maximum number of new tokens, the end-of-sequence token included.
        dropout: of rollouts and scoring.
        latent_policy: the law of a step of thought.
        data: the problems to train and to evaluate on.
        gate: the stopping gate.
        imitate: the stage imitate.
        cold_start: the stage cold_start.
        best_of_n: the stage best_of_n.
        rl: the stage rl.
        objective: NAME = settings of an objective; a further NAME says the `kind` that it is of.
        latent_rm: the stage latent_rm, which trains a reward model of latents.
        reward: "correct" is 1 where the answer is the reference, else 0; others are registered. "" is the task's own
            verifier of a generated set, else "correct".
        rewards: several rewards with weights, (NAME, WEIGHT) each, in the place of `reward`; the first that gives a
            verdict on a completion says whether it is right.
        reward_processes: processes in which each reward function is asked, one completion at a time; 0 asks in the
            run's own. What can't be sent to a process is refused.
        reward_seconds: most seconds of a reward function for a completion, which else isn't judged and counts as
            `reward_failed`; above 0 it is asked in one process at least, 0 sets no limit.
        evaluate: the stage evaluate, and validation in the others.
        trackers: where rows of metrics.jsonl go as well, see docs/train.md.
        log_every: steps between rows of metrics.jsonl, which are means over them.
        checkpoint_every: steps between checkpoints.
        max_skipped_steps: consecutive steps without a finite loss and gradient before a run ends; they change
            nothing.
        stuck_after: seconds in which none of several processes gets on before the one that is behind is named and the
            run ends; 0 is never.
        cpu_devices: shards of the batch where there is no accelerator; the results depend on it by rounding alone.
        sharding: how parameters lie on the devices.
    """

    stages: tuple[Section, ...] = setting(USUAL, fewest=1)
    seed: int = setting(0, least=0, most=2**32 - 1)  # jax leaves out the bits beyond
    init: str = ""
    base: str = ""
    lora_alpha: float | None = setting(None, above=0)
    reasoner: str = "coconut_gpt2"
    tokenizer: str = ""
    model: ModelConfig = ModelConfig()
    prompt: PromptConfig = PromptConfig()
    max_latents: int = setting(12, least=0)
    min_latents: int = setting(3, least=1)
    prompt_slots: tuple[int, ...] = setting((128, 256), least=1, fewest=1)
    max_answer_tokens: int = setting(16, least=1)
    dropout: DropoutConfig = DropoutConfig()
    latent_policy: LatentPolicyConfig = setting(make=latent_policy_config)
    data: DataConfig = DataConfig()
    gate: GateConfig = GateConfig()
    imitate: ImitateSettings = setting(make=imitate_config)
    cold_start: ColdStartConfig = ColdStartConfig()
    best_of_n: BestOfNConfig = BestOfNConfig()
    rl: RlConfig = RlConfig()
    objective: dict[str, Objective] = setting(make=_default_objectives, entry=_entry)
    latent_rm: LatentRmConfig = LatentRmConfig()
    reward: str = ""
    rewards: tuple[tuple[str, float], ...] = ()
    reward_processes: int = setting(0, least=0, note="0 is the run's own")
    reward_seconds: float = setting(0.0, least=0, note="0 is no limit")
    evaluate: EvaluateConfig = EvaluateConfig()
    trackers: tuple[str, ...] = ("tensorboard",)
    log_every: int = setting(10, least=1)
    checkpoint_every: int = setting(500, least=1)
    max_skipped_steps: int = setting(10, least=1)
    stuck_after: float = setting(1800.0, least=0, note="0 is never")
    cpu_devices: int = setting(1, least=1, most=1024)
    sharding: ShardingConfig = ShardingConfig()

    def __post_init__(self) -> None:
        check_fields(self)
        # Rewards have to be registered, and stand in one of the two keys.
        names = [name for name, _ in self.rewards]
        choices = ", ".join(REWARDS)
        if self.reward not in ("", *REWARDS):
            raise FieldError(
                self,
                "reward",
                f"give one of {choices}, or the file that registers it (--register)",
            )
        for place, name in enumerate(names):
            if name not in REWARDS:
                raise FieldError(
                    self,
                    "rewards",
                    f"{name!r} is none of {choices}; give the file with it (--register)",
                )
            if name in names[:place]:
                raise FieldError(
                    self,
                    "rewards",
                    f"{name!r} is there twice; give it once, with one weight",
                )
        if self.reward and names:
            raise FieldError(
                self,
                "reward",
                "config.rewards is given too; leave one of the two out, or clear that by --config.rewards=()",
            )
        # The first one says what is right, so it can't be one that compares right completions.
        first = names[0] if names else self.reward
        if first and REWARDS[first].follows:
            remedy = f"put one that says what is right before it, e.g. (('correct', 1.0), ({first!r}, 1.0))"
            raise FieldError(
                self, "rewards", f"{first} compares right completions; {remedy}"
            )
        if self.min_latents > max(self.max_latents, 1):
            raise FieldError(
                self,
                "min_latents",
                f"it is more than max_latents ({self.max_latents}); lower it",
            )

    @property
    def weighted(self) -> tuple[tuple[str, float], ...]:
        """The rewards with their weights; the first that gives a verdict says what is right."""
        return self.rewards or ((self.reward or task_reward(self.data.train), 1.0),)

    @property
    def reward_facts(self) -> dict[str, Any]:
        """What a result depends on of the rewards, by key of the config."""
        facts = dict[str, Any]()
        (only, weight), *others = self.weighted
        if weight == 1 and not others:
            facts["reward"] = only
        else:
            facts["rewards"] = [list(pair) for pair in self.weighted]
        # Functions of a user's own may change behind their names.
        for name, _ in self.weighted:
            function = REWARDS[name].function
            digest = code_of(function) if function else ""
            if digest:
                facts[f"reward_code.{name}"] = digest
        return facts


def default_config() -> ConfigDict:
    """Return the paper's settings, without data: `configs/` say what to train on."""
    config = section(Config())
    # A misspelt key in a config file is an error too; these sections take names that it makes up.
    config.lock()
    config.data.eval.unlock()
    config.data.gym.settings.unlock()
    config.objective.unlock()
    return config


def objective_variant(
    config: ConfigDict, name: str, kind: str, **settings: Any
) -> None:
    """Add an entry to `config.objective`: an objective with other settings, trained under a name of its own.

    Args:
        name: of its checkpoint and its row; put it into `config.rl.objectives` too.
        kind: a name in `training.objectives.OBJECTIVES`.
    Raises:
        UserError: unknown kind or setting.
    """
    if kind not in OBJECTIVES:
        raise UserError(
            f"config.objective.{name}.kind: {kind!r} is unknown; use one of {', '.join(OBJECTIVES)}"
        )
    objective = merge_settings(
        OBJECTIVES[kind](), {"kind": kind, **settings}, key=f"config.objective.{name}"
    )
    config.objective[name] = section(objective)


def variant_name(name: str, rate: float) -> str:
    """Name an objective at a rate that is tried, such as NAME_3e_05: a name that flags can give."""
    return f"{name}_{rate:.0e}".replace("-", "_")


def read_config(node: Mapping[str, Any] | ConfigDict) -> Config:
    """Read a config, with keys of `default_config`; relations between sections are not checked.

    Raises:
        UserError: one line with the key and the remedy.
    """
    return merge_settings(Config(), node)


def rl_of(rl: RlConfig, objective: Objective) -> RlConfig:
    """Return `config.rl` with the objective's own settings in place of the shared ones."""
    layer = dict[str, Any]()
    if objective.steps:
        layer["steps"] = objective.steps
    for name in OPTIMIZER_KEYS:
        value = getattr(objective, name)
        if value:
            layer[f"optimizer.{name}"] = value
    # A temperature of 0 is one of its own, too.
    if objective.temperature is not None:
        layer["temperature"] = objective.temperature
    return merge_settings(rl, layer, key="config.rl")


def stage_config(config: Config, name: str) -> Config:
    """Return the config of one stage alone, as the run writes it beside the stage's parameters.

    An objective has the section rl with its own settings in their place. Imitation that is not taught where to stop
    trains no gate. The reward is named.

    Args:
        name: of the stage's checkpoint.
    """
    section = section_of(name)
    changes: dict[str, Any] = {"stages": (section,)}
    if section == IMITATE and (name == NO_THOUGHT or not config.imitate.gate_weight):
        changes["gate"] = replace(config.gate, enabled=False)
    if section == RL and name in config.objective:
        changes["rl"] = replace(
            rl_of(config.rl, config.objective[name]), objectives=(name,)
        )
    (reward, weight), *others = config.weighted
    if weight == 1 and not others:
        changes |= {"reward": reward, "rewards": ()}
    return replace(config, **changes)


def ends_at(config: Config) -> str:
    """Return the text that a thought ends where it comes; "" where there is none."""
    return config.latent_policy.selected.stop_token or config.prompt.closing


def own_latents(config: Config) -> int:
    """Return the number of latents that imitation ends with: the reasoner's own without a gate; a text's is 0.

    Where a thought ends at a text, it is the most that there may be.
    """
    has_latents = architecture_of(config.reasoner).has_latents
    if config.prompt.closing or (has_latents and ends_at(config)):
        return config.max_latents
    if not has_latents:
        return 0
    return min(
        config.max_latents,
        max(1, config.imitate.c_thought * config.imitate.max_latent_stage),
    )
