"""What a config describes, built once: mesh, models, data, reward. The stages in `slpo_jax.stages` work on it."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from slpo_jax.errors import UserError
from slpo_jax.evaluation.evaluate import Evaluator, Reader
from slpo_jax.models.gate import Gate, stopping_gate
from slpo_jax.models.gpt2 import GPT2Config
from slpo_jax.models.reasoner import Reasoner, coconut
from slpo_jax.policy.rollout import RolloutConfig
from slpo_jax.text.batches import EncodedProblems, encode_problems
from slpo_jax.text.problems import load_problems, without
from slpo_jax.text.synthetic import SyntheticConfig
from slpo_jax.text.templates import Template, coconut_template
from slpo_jax.text.tokenizer import load_tokenizer, token_bytes
from slpo_jax.text.verifier import byte_table, reference_width, verify
from slpo_jax.training.loop import MetricsLog
from slpo_jax.training.optimizer import OptimizerConfig
from slpo_jax.training.slpo import RewardFn
from slpo_jax.training.state import data_mesh, replicate


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A reasoner: its model's config class, its functions and its texts."""

    model_config: Callable[..., Any]
    functions: Callable[[Any], Reasoner]
    template: Callable[..., Template]


REASONERS = {"coconut_gpt2": Recipe(GPT2Config, coconut, coconut_template)}


@dataclasses.dataclass
class Experiment:
    """A run in the making.

    Attributes:
        config: as resolved.
        template: the reasoner's texts and tokenizer.
        rollout: slots, ids and dropout of training rollouts.
        train, valid, tests: encoded problems; `tests` by name, loaded on first use through `test_set`.
        reward: (tokens, references) -> right or not, inside jit.
    """

    config: ConfigDict
    workdir: Path
    mesh: Mesh
    key: jax.Array
    log: MetricsLog
    template: Template
    reasoner: Reasoner
    gate: Gate
    rollout: RolloutConfig
    reward: RewardFn
    _sets: dict[str, EncodedProblems] = dataclasses.field(default_factory=dict)

    @property
    def train(self) -> EncodedProblems:
        return self._set("config.data.train", self.config.data.train)

    @property
    def valid(self) -> EncodedProblems:
        return self._set("config.data.valid", self.config.data.valid)

    def test_set(self, name: str) -> EncodedProblems:
        """The set under config.data.eval."""
        return self._set(f"config.data.eval.{name}", self.config.data.eval[name])

    def _set(self, key: str, source: str) -> EncodedProblems:
        if key not in self._sets:
            encoded = encode_problems(self.template, _load(self.config, key, source))
            _check_prompts(self.config, key, encoded)
            self._sets[key] = encoded
        return self._sets[key]

    @functools.cached_property
    def reference_width(self) -> int:
        """Bytes of an encoded reference."""
        return reference_width([problem.answer for problem in self.train.problems])

    def initial_params(self) -> dict[str, Any]:
        """Random parameters, the same for the same seed."""
        reasoner_key, gate_key = jax.random.split(jax.random.fold_in(self.key, 1 << 30))
        params = jax.jit(lambda: {"reasoner": self.reasoner.init(reasoner_key), "gate": self.gate.init(gate_key)})()
        return replicate(params, self.mesh)

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """Rollouts over whole sets, with the answer budget of evaluation."""
        evaluate = self.config.evaluate
        answer_slots = evaluate.max_answer_tokens or self.config.max_answer_tokens
        config = dataclasses.replace(self.rollout, answer_slots=answer_slots, temperature=0.0)
        slots = self.config.prompt_slots
        return Evaluator(self.reasoner, self.gate, config, self.mesh, evaluate.batch_size, slots, self.key)

    @functools.cached_property
    def reader(self) -> Reader:
        return Reader(self.template)

    def optimizer_config(self, stage: str, total_steps: int) -> OptimizerConfig:
        """The stage's `config.STAGE.optimizer`, checked."""
        values = self.config[stage].optimizer.to_dict()
        return OptimizerConfig(**values, total_steps=total_steps, key=f"config.{stage}.optimizer")


def build(config: ConfigDict, workdir: Path) -> Experiment:
    """Everything that a config describes, except data sets, which are read when a stage asks for them.

    Raises:
        UserError: a key's value can't be used.
    """
    if config.reasoner not in REASONERS:
        raise UserError(f"config.reasoner: {config.reasoner!r} is unknown; use one of {', '.join(REASONERS)}")
    recipe = REASONERS[config.reasoner]
    template = recipe.template(load_tokenizer(config.tokenizer))
    pieces = token_bytes(template.tokenizer)
    model = config.model.to_dict() | {
        "vocab_size": len(pieces),
        "dropout_sites": tuple(config.model.dropout_sites),
        "dtype": jnp.dtype(config.model.dtype),
    }
    longest = max(config.prompt_slots) + config.max_latents
    longest += max(config.max_answer_tokens, config.evaluate.max_answer_tokens or 0)
    if longest > config.model.n_positions:
        raise UserError(
            f"config.model.n_positions: {config.model.n_positions} is less than the {longest} slots of prompt, latents "
            "and answer; raise it or lower config.prompt_slots"
        )
    reasoner = recipe.functions(recipe.model_config(**model))
    table, eos_id, style = byte_table(pieces), template.eos_id, template.answer_style
    return Experiment(
        config=config,
        workdir=workdir,
        mesh=data_mesh(),
        key=jax.random.key(config.seed),
        log=MetricsLog(workdir),
        template=template,
        reasoner=reasoner,
        gate=stopping_gate(reasoner.width, config.gate.hidden, config.gate.detached),
        rollout=RolloutConfig(
            max_latents=config.max_latents,
            answer_slots=config.max_answer_tokens,
            end_id=template.end_id,
            eos_id=eos_id,
            pad_id=template.pad_id,
            dropout_rate=config.dropout.rate,
            dropout_where=config.dropout.where,
        ),
        reward=lambda tokens, references: verify(table, tokens, references, eos_id, style),
    )


def _check_prompts(config: ConfigDict, key: str, problems: EncodedProblems) -> None:
    """Fail before the first step, not at the one that draws the problem."""
    used = config.evaluate.limit if key.startswith("config.data.eval") else 0
    lengths = [len(prompt) for prompt in problems.prompts[: used or None]]
    if max(lengths) > max(config.prompt_slots):
        raise UserError(
            f"{key}: problem {lengths.index(max(lengths))} has a prompt of {max(lengths)} tokens, more than the "
            f"{max(config.prompt_slots)} of config.prompt_slots; add a larger bucket there or drop the problem"
        )


def _load(config: ConfigDict, key: str, source: str):
    if not source:
        raise UserError(f"{key}: not set; give a file or a synthetic set such as synthetic:train")
    synthetic = SyntheticConfig(**config.data.synthetic.to_dict())
    try:
        problems = load_problems(source, synthetic)
        if key == "config.data.train" and config.data.valid:
            # GSM8K's training file holds the validation questions; nothing may be chosen on problems trained on.
            problems = without(problems, load_problems(config.data.valid, synthetic))
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    if not problems:
        raise UserError(f"{key}: every problem of {source} is also in config.data.valid; give another set")
    return problems
