"""What a config describes, built once: mesh, models, data, reward. The stages in `slpo_jax.run.stage` work on it."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import Mesh, NamedSharding

from slpo_jax.checkpoints.checkpoint import Checkpoint, find_checkpoint
from slpo_jax.checkpoints.decode_settings import go_with
from slpo_jax.checkpoints.detect import Identity, identify, newest_checkpoint
from slpo_jax.config.config import Config, make_latent_policy
from slpo_jax.config.sections import changed
from slpo_jax.data.batches import EncodedProblems, encode_problems
from slpo_jax.data.problem import Problem
from slpo_jax.data.problems import is_at_hand
from slpo_jax.data.templates import Template
from slpo_jax.data.tokenizer import WORDS
from slpo_jax.errors import UserError
from slpo_jax.evaluation.evaluate import Evaluator
from slpo_jax.io import hosts
from slpo_jax.io.mesh import EVERYWHERE, device_mesh, replicate
from slpo_jax.io.orbax import load_params, stored_params
from slpo_jax.io.workdir import Workdir
from slpo_jax.models import parts, xla_cpu
from slpo_jax.models.gate import Gate, stopping_gate
from slpo_jax.models.parts import GATE, LATENT_POLICY, REASONER, Part
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy.latent_policies import LatentPolicy
from slpo_jax.policy.policy import Policy, RolloutConfig
from slpo_jax.rewards.reward import Reward
from slpo_jax.rewards.verifier import reference_width
from slpo_jax.run.sources import load_set, only_errors
from slpo_jax.run.validate import (
    check_answers,
    check_latent_policy,
    check_prompts,
    check_start,
    earnable,
    fitting_slots,
    say_unknown,
)
from slpo_jax.stages import COLD_START, EVALUATE, IMITATE, RL, wanted
from slpo_jax.training.metrics import MetricsLog
from slpo_jax.training.optimizer import OptimizerConfig
from slpo_jax.training.recipes import Recipe, recipe_of
from slpo_jax.training.sharding import Layout


@dataclasses.dataclass(kw_only=True)
class Setup:
    """What a config describes, without a place on the disk: models, texts and data to train on or to look at.

    Attributes:
        config: as resolved; config.model holds the shapes of what was loaded.
        checkpoint: what the run starts from.
        prompt_slots: config.prompt_slots, as far as the model has positions for them.
        parts: of the parameters.
        policy: reasoner, latent policy, and slots, ids and noise of rollouts.
        train, valid, tests: encoded problems; `tests` by name, loaded on first use through `test_set`.
        reward: what reads and judges completions.
    """

    config: Config
    mesh: Mesh
    key: jax.Array
    checkpoint: Checkpoint
    prompt_slots: tuple[int, ...]
    parts: tuple[Part, ...]
    policy: Policy
    reward: Reward
    _sets: dict[str, EncodedProblems] = dataclasses.field(default_factory=dict)

    @property
    def reasoner(self) -> Reasoner:
        """The policy's."""
        return self.policy.reasoner

    @property
    def template(self) -> Template:
        """The reasoner's texts and tokenizer."""
        return self.checkpoint.template

    @property
    def train(self) -> EncodedProblems:
        return self._set("config.data.train", self.config.data.train)

    @property
    def valid(self) -> EncodedProblems:
        return self._set("config.data.valid", self.config.data.valid)

    def test_set(self, name: str) -> EncodedProblems:
        """The set under config.data.eval."""
        return self._set(f"config.data.eval.{name}", self.config.data.eval[name])

    @property
    def sets(self) -> Mapping[str, EncodedProblems]:
        """Those that have been read, by key."""
        return self._sets

    def problems(self, key: str) -> Sequence[Problem]:
        """What config.data.train or .valid holds, to compare with.

        Returns:
            () where that isn't read and would take long, or can't be read: nothing but the comparison asks for it.
        """
        source = getattr(self.config.data, key.rpartition(".")[2])
        if key in self._sets:
            return self._sets[key].problems
        try:
            return load_set(self.config, key, source) if source and is_at_hand(source) else ()
        except UserError as error:
            logging.warning("%s: what is evaluated was not compared with it (%s)", key, error)
            return ()

    def _set(self, key: str, source: str) -> EncodedProblems:
        if key not in self._sets:
            self._sets[key] = self.encode(key, load_set(self.config, key, source), f"{key}: {source}")
        return self._sets[key]

    def encode(
        self, key: str, problems: Sequence[Problem], where: str = "", judge: Reward | None = None
    ) -> EncodedProblems:
        """Problems with their token ids, without those whose own answer would be wrong, which are counted.

        Args:
            key: what they are called in messages.
            where: the same of messages on a problem's words.
            judge: of their answers; None is `reward`.
        Raises:
            UserError: a prompt or an answer is too long, or one to train on has a word that the tokenizer doesn't know.
        """
        trains = key == "config.data.train"
        unknown = None if trains else Counter[str]()
        try:
            encoded = encode_problems(self.template, problems, trains and IMITATE in self.config.stages, unknown)
        except UserError as error:
            raise UserError(f"{where or key}: {error}") from None
        if unknown and hosts.is_first():
            say_unknown(key, encoded, unknown)
        encoded = earnable(encoded, where or key, judge or self.reward)
        check_prompts(self.config, key, encoded, max(self.prompt_slots))
        check_answers(self.config, key, encoded, self._asked(key, len(encoded)))
        return encoded

    def _asked(self, key: str, count: int) -> range:
        """Which problems of a set of so many rollouts are made for; imitation says itself which it imitates."""
        if key == "config.data.train":
            return range(count if {*self.config.stages} - {IMITATE, EVALUATE} else 0)
        return range(min(self.config.evaluate.limit or count, count))

    @functools.cached_property
    def reference_width(self) -> int:
        """Bytes of an encoded reference; 0 where the host alone can judge."""
        if self.reward.on_device is None:
            return 0
        return reference_width([problem.answer for problem in self.train.problems], self.reward.style)

    def abstract_params(self, stored: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """Shapes, types and sharding of the parameters.

        Args:
            stored: those of a checkpoint, of which parts that are carried along are among them.
        """
        shapes = jax.eval_shape(self._random_params) | parts.carried(stored)
        everywhere = NamedSharding(self.mesh, EVERYWHERE)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), shapes)

    def stored_params(self, draws_latent_policy: bool = False) -> dict[str, Any]:
        """Shapes and types of what a checkpoint of this project as `config.init` holds; of others {}.

        Args:
            draws_latent_policy: it may lack parameters of the latent policy's own, whatever the stages are.
        Raises:
            UserError: it is damaged, or can't be gone on from with this latent policy.
        """
        orbax = self.checkpoint.orbax
        stored: dict[str, Any] = {} if orbax is None else stored_params(orbax)
        if orbax is not None or self.checkpoint.read is not None:
            check_latent_policy(self.config, stored, self.abstract_params(), draws_latent_policy)
        return stored

    def initial_params(self, draws_latent_policy: bool = False, explain: bool = False) -> dict[str, Any]:
        """The parameters that `config.init` names, and random ones, the same for the same seed, for what it lacks.

        Args:
            draws_latent_policy: parameters of the latent policy's own that it lacks need not be trained afterwards.
            explain: also SIM-CoT's decoder of a foreign checkpoint, if there is one; ours always have theirs.
        """
        found: dict[str, Any] = {}
        stored = self.stored_params(draws_latent_policy)
        if self.checkpoint.orbax is not None:
            shapes = self.abstract_params(stored)
            found = load_params(self.checkpoint.orbax, {name: shapes[name] for name in stored})
        elif self.checkpoint.read is not None:
            found = self.checkpoint.read(explain)

        missing = jax.jit(lambda: parts.lacking(found, self._random_params()))()
        return replicate(parts.merged(found, missing), self.mesh)

    def _random_params(self) -> dict[str, Any]:
        return parts.drawn(self.parts)

    def trained_by(self, stage: str, params: dict[str, Any]) -> tuple[str, ...]:
        """The parts of these parameters that a stage's optimizer changes."""
        return parts.trained_by(stage, self.parts, params)

    @functools.cached_property
    def recipe(self) -> Recipe:
        """How the stage imitate trains the reasoner."""
        return recipe_of(self.config.imitate, self.checkpoint.architecture.default_recipe)

    @functools.cached_property
    def layout(self) -> Layout:
        """How the states of the stages lie on the mesh."""
        return Layout(self.mesh)

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """Rollouts over whole sets, with the answer budget of evaluation."""
        evaluate = self.config.evaluate
        answer_slots = evaluate.max_answer_tokens or self.config.max_answer_tokens
        sampling = {"temperature": evaluate.temperature, "top_k": evaluate.top_k, "top_p": evaluate.top_p}
        rate = self.config.dropout.rate if evaluate.dropout is None else evaluate.dropout
        policy = self.policy.having(answer_slots=answer_slots, dropout_rate=rate, **sampling)
        slots = {*self.prompt_slots, *range(evaluate.prompt_multiple, max(self.prompt_slots), evaluate.prompt_multiple)}
        search = evaluate.beams, evaluate.candidates
        return Evaluator(policy, self.mesh, evaluate.batch_size, sorted(slots), self.key, evaluate.scorers, search)

    def optimizer_config(self, stage: str, total_steps: int, **own: Any) -> OptimizerConfig:
        """The stage's `config.STAGE.optimizer`, checked; with `own` values instead of some of it."""
        shared = getattr(self.config, stage).optimizer
        return changed(shared, own | {"total_steps": total_steps}, f"config.{stage}.optimizer")


@dataclasses.dataclass(kw_only=True)
class Experiment(Setup):
    """A run in the making: a setup, its workdir and its log."""

    workdir: Workdir
    log: MetricsLog


def build(config: Config, workdir: Path, given: Collection[str] = ()) -> Experiment:
    """Everything that a config describes, except data sets, which are read when a stage asks for them.

    Args:
        given: see `checkpoints.decode_settings.go_with`.
    Raises:
        UserError: a key's value can't be used.
    """
    paths, identity = Workdir(workdir), None
    if config.init:
        config = dataclasses.replace(config, init=newest_checkpoint(config.init))
        identity = identify(config.init, config.base, config.lora_alpha)
    config, lines = go_with(config, identity, paths, given)
    setup = assemble(config, paths, identity)
    for line in lines if hosts.is_first() else ():
        logging.warning("%s", line)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--workdir={workdir}: is no directory to write to ({error.strerror}); give another") from None
    parts = {field.name: getattr(setup, field.name) for field in dataclasses.fields(setup)}
    return Experiment(**parts, workdir=paths, log=MetricsLog(paths))


def assemble(
    config: Config,
    workdir: Workdir | None = None,
    identity: Identity | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Setup:
    """`build` without writing anything.

    Args:
        workdir: whose finished stages may make up for what `config.init` lacks.
        identity: of `config.init`, if it was asked for already.
        devices: None is all there are.
    Raises:
        UserError: a key's value can't be used.
    """
    checkpoint = _opened(config, workdir, identity)
    template, model = checkpoint.template, checkpoint.description.model
    check_start(config, checkpoint, workdir)
    config = _resolve(config, checkpoint)
    if not xla_cpu.on_cpu():
        # What is float32 is computed in float32, not in a type with fewer bits that the device is quicker in.
        jax.config.update("jax_default_matmul_precision", "highest")
    reasoner = checkpoint.architecture.on(model)
    gate = stopping_gate(reasoner.width, config.gate.hidden, config.gate.detached)
    latent_policy = make_latent_policy(config, template.token, template.closing_ids if config.prompt.closing else ())(
        reasoner.in_tree(), gate.in_tree()
    )
    prompt_slots = fitting_slots(config, model.n_positions - max(len(template.closing_ids) - 1, 0))
    reward = Reward(config.reward, template.answer_style, template.token_bytes, template.eos_ids)
    rollouts = RolloutConfig(
        max_latents=config.max_latents,
        answer_slots=config.max_answer_tokens,
        closing_ids=template.closing_ids,
        eos_ids=template.eos_ids,
        pad_id=template.pad_id,
        dropout_rate=config.dropout.rate,
        dropout_where=config.dropout.where,
        banned_ids=template.banned_ids,
    )
    key = jax.random.key(config.seed)
    return Setup(
        config=config,
        mesh=device_mesh(devices, config.sharding.fsdp),
        key=key,
        checkpoint=checkpoint,
        prompt_slots=prompt_slots,
        parts=_parts(config, key, reasoner, gate, latent_policy),
        policy=Policy(
            reasoner.in_tree(), latent_policy, rollouts, layout="rows" if template.start_id is None else "packed"
        ),
        reward=reward,
    )


def _opened(config: Config, workdir: Workdir | None, identity: Identity | None) -> Checkpoint:
    """Where a run starts from; words of the training data are those of the workdir, once nothing is trained."""
    if config.tokenizer == WORDS and workdir and (done := workdir.finished_stages()) and not wanted(config, done):
        config = dataclasses.replace(config, tokenizer=str(workdir.reasoner))

    def problems():
        with only_errors():  # the stages warn of the data when they read them
            return load_set(config, "config.data.train", config.data.train)

    return find_checkpoint(config, identity, problems)


def _parts(
    config: Config, key: jax.Array, reasoner: Reasoner, gate: Gate, latent_policy: LatentPolicy
) -> tuple[Part, ...]:
    """The parts of the parameters, and the stages that train each."""
    reasoner_key, gate_key = jax.random.split(jax.random.fold_in(key, 1 << 30))
    with_backbone = {COLD_START} if config.cold_start.train_backbone else set()
    return (
        Part(REASONER, reasoner_key, reasoner.init, frozenset({IMITATE, RL} | with_backbone)),
        Part(GATE, gate_key, gate.init, frozenset({COLD_START, RL} if config.gate.enabled else {COLD_START})),
        Part(LATENT_POLICY, jax.random.fold_in(key, 1 << 28), latent_policy.init, frozenset({RL})),
    )


def _resolve(config: Config, checkpoint: Checkpoint) -> Config:
    """The config with the loaded shapes, so that config.json says what was run."""
    model = checkpoint.description.model
    found = {name: getattr(model, name, getattr(checkpoint.architecture, name, None)) for name in vars(config.model)}
    found["dtype"] = jnp.dtype(model.dtype).name
    shapes = dataclasses.replace(config.model, **{key: value for key, value in found.items() if value is not None})
    return dataclasses.replace(config, model=shapes)
