"""What a config describes, whatever the workdir: mesh, models, data, reward."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from slpo_jax.checkpoints.checkpoint import Checkpoint, find_checkpoint
from slpo_jax.checkpoints.identity import Identity, NativeCheckpoint
from slpo_jax.config.config import Config
from slpo_jax.config.overrides import merge_settings
from slpo_jax.data.batches import EncodedProblems, encode_problems
from slpo_jax.data.problem import Problem
from slpo_jax.data.templates import Template
from slpo_jax.data.tokenizer import WORDS
from slpo_jax.errors import UserError, about, key_name
from slpo_jax.evaluation.evaluator import Evaluator
from slpo_jax.io.workdir import Workdir
from slpo_jax.models import parts, xla_cpu
from slpo_jax.models.gate import Gate, stopping_gate
from slpo_jax.models.parts import GATE, LATENT_POLICY, REASONER, Part
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy.noise import Stream
from slpo_jax.policy.policy import Policy, RolloutConfig
from slpo_jax.rewards.reward import Reward
from slpo_jax.run import run_checks
from slpo_jax.run.sources import (
    DEMOS,
    EVAL,
    LEARNED,
    TRAIN,
    VALID,
    learned_from,
    load_set,
)
from slpo_jax.runtime import hosts
from slpo_jax.runtime.mesh import EVERYWHERE, Layout, device_mesh, replicate
from slpo_jax.stages import (
    COLD_START,
    EVALUATE,
    IMITATE,
    REASONER_STAGES,
    RL,
    wanted_stages,
)
from slpo_jax.training.optimizer import OptimizerConfig
from slpo_jax.training.recipes import Recipe, recipe_of


@dataclasses.dataclass(kw_only=True)
class Setup:
    """The models, texts and data that a config describes, whatever the workdir.

    Attributes:
        config: as resolved; config.model holds the shapes of what was loaded.
        checkpoint: what the run starts from.
        prompt_slots: config.prompt_slots, cut to the model's positions.
        parts: of the parameters.
        policy: reasoner, latent policy, and slots, ids and noise of rollouts.
        reward: what reads and judges completions.
        sets: encoded problems that have been read, by key.
        noted: labels of rollouts whose answers a line has said to be cut, once for all.
    """

    config: Config
    mesh: Mesh
    key: jax.Array
    checkpoint: Checkpoint
    prompt_slots: tuple[int, ...]
    parts: tuple[Part, ...]
    policy: Policy
    reward: Reward
    sets: dict[str, EncodedProblems] = dataclasses.field(default_factory=dict)
    noted: set[str] = dataclasses.field(default_factory=set)

    @property
    def reasoner(self) -> Reasoner:
        """The policy's reasoner."""
        return self.policy.reasoner

    @property
    def template(self) -> Template:
        """The reasoner's texts and tokenizer."""
        return self.checkpoint.template

    @property
    def train(self) -> EncodedProblems:
        """The problems to train on."""
        return self._set(TRAIN, self.config.data.train)

    @property
    def demos(self) -> EncodedProblems:
        """The problems to imitate."""
        return (
            self._set(DEMOS, self.config.data.demos)
            if self.config.data.demos
            else self.train
        )

    @property
    def valid(self) -> EncodedProblems:
        """The problems to choose on."""
        return self._set(VALID, self.config.data.valid)

    @property
    def tests(self) -> tuple[str, ...]:
        """The names under `config.data.eval` that the stage evaluate asks for."""
        return tuple(self.config.evaluate.datasets or self.config.data.eval)

    def test_set(self, name: str) -> EncodedProblems:
        """Return the set of this name under `config.data.eval`."""
        return self._set(EVAL + name, self.config.data.eval[name])

    def _set(self, key: str, source: str) -> EncodedProblems:
        if key not in self.sets:
            problems = load_set(self.config, key, source)
            problems.warn()
            self.sets[key] = self.encode(key, problems, f"{key}: {source}")
        return self.sets[key]

    def encode(
        self,
        key: str,
        problems: Sequence[Problem],
        where: str = "",
        judge: Reward | None = None,
    ) -> EncodedProblems:
        """Return problems with their token ids, without those whose own answer would be wrong, which are counted.

        Args:
            key: what they are called in messages.
            where: the same of messages on a problem's words.
            judge: of their answers; None is `reward`.
        Raises:
            UserError: a prompt or an answer is too long, or one to train on has a word that the tokenizer doesn't know.
        """
        trains = key in LEARNED
        stages = {*self.config.stages}
        imitated = DEMOS if self.config.data.demos else TRAIN
        copies = IMITATE in stages and key == imitated
        # Check answers where a stage is going to judge them: of every evaluated set, and of the training set unless
        # imitation alone uses it, which says itself which problems it copies.
        judges = not trains or (key == TRAIN and stages - {IMITATE, EVALUATE})
        unknown = None if trains else Counter[str]()
        with about(where or key):
            encoded = encode_problems(self.template, problems, copies, unknown)
        if unknown and hosts.is_first():
            run_checks.say_unknown(key, encoded, unknown)
        judge = judge or self.reward
        if judges:
            run_checks.check_reward(key, encoded, judge, self.config.max_latents)
        encoded = run_checks.drop_unverifiable(encoded, where or key, judge)
        # Every problem that is asked for needs room for its prompt and its answer.
        limit = None if trains else self.config.evaluate.limit or None
        places = range(len(encoded))[:limit]
        most = max(self.prompt_slots)
        is_cut = most < max(self.config.prompt_slots)
        run_checks.check_prompts(key, encoded.prompts[: len(places)], most, is_cut)
        if judges:
            budget = self.evaluated_answers
            if trains:
                budget = ("max_answer_tokens", self.config.max_answer_tokens)
            run_checks.check_answers(key, encoded, places, *budget)
        return encoded

    @property
    def evaluated_answers(self) -> tuple[str, int]:
        """The key of the most tokens that an answer may have in evaluations, and that number."""
        most = self.config.evaluate.max_answer_tokens
        if most:
            return "evaluate.max_answer_tokens", most
        return "max_answer_tokens", self.config.max_answer_tokens

    @functools.cached_property
    def references(self) -> Callable[[Sequence[Problem]], np.ndarray] | None:
        """Training problems -> their references, uint8 [B, R], as wide as all need; None where the host judges."""
        if self.reward.on_device is None:
            return None
        width = self.reward.width(self.train.problems)
        return lambda problems: self.reward.encode(problems, width)

    def abstract_params(
        self, stored: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Return shapes, types and sharding of the parameters.

        Args:
            stored: those of a checkpoint, of which parts that are carried along are among them.
        """
        shapes = jax.eval_shape(
            lambda: parts.init_parts(self.parts)
        ) | parts.carried_parts(stored)
        everywhere = NamedSharding(self.mesh, EVERYWHERE)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
            shapes,
        )

    def stored_shapes(self) -> dict[str, Any]:
        """Return shapes and types of what a checkpoint of this project as `config.init` holds; of others {}.

        Raises:
            UserError: it can't be gone on from with this latent policy.
        """
        opened = self.checkpoint.opened
        init = self.config.init
        name = self.config.latent_policy.name
        stored = opened.stored.shapes if isinstance(opened, NativeCheckpoint) else {}
        # Compare the latent policy's parameters: those of the config and those of the checkpoint.
        drawn = self.abstract_params()
        here = jax.tree.map(lambda x: x.shape, drawn.get(LATENT_POLICY))
        there = jax.tree.map(lambda x: x.shape, stored.get(LATENT_POLICY))
        if init and there is not None and there != here:
            raise UserError(
                f"{key_name('config.latent_policy.name')}: {init} has parameters of another latent policy than {name}, "
                "or of another width; set config.latent_policy as it was trained with"
            )
        if init and here is not None and there is None and RL not in self.config.stages:
            raise UserError(
                f"{key_name('config.latent_policy.name')}: {init} comes without the parameters of {name}; train them "
                "in the stage rl, or use another latent policy"
            )
        return stored

    def initial_params(self, explain: bool = False) -> dict[str, Any]:
        """Return the parameters that `config.init` names, and random ones, the same for a seed, for what it lacks.

        Args:
            explain: also SIM-CoT's decoder of an external checkpoint, if there is one; ours always have theirs.
        """
        stored = self.stored_shapes()
        shapes = self.abstract_params(stored) if stored else {}
        named = {name: shapes[name] for name in stored}
        stored_parts = self.checkpoint.read(named, explain)

        def draw_missing():
            return parts.find_missing(stored_parts, parts.init_parts(self.parts))

        # Inside jit nothing is drawn that is not missing.
        missing = jax.jit(draw_missing)()
        return replicate(parts.merge_parts(stored_parts, missing), self.mesh)

    def trained_by(self, section: str, params: dict[str, Any]) -> tuple[str, ...]:
        """Return the parts of these parameters that the optimizer of a section's stage changes."""
        present = [part for part in self.parts if part.name in params]
        return tuple(part.name for part in present if section in part.trained_by)

    @functools.cached_property
    def recipe(self) -> Recipe:
        """The recipe by which the stage imitate trains the reasoner."""
        default = self.checkpoint.description.architecture.default_recipe
        return recipe_of(self.config.imitate, default, self.template.trained_ids)

    @functools.cached_property
    def layout(self) -> Layout:
        """The layout of the stages' states on the mesh."""
        return Layout(self.mesh)

    @property
    def most_prompt(self) -> int:
        """Tokens that a prompt may have in evaluations, by the model's positions."""
        return (
            self.reasoner.config.n_positions
            - self.config.max_latents
            - self.evaluator.policy.config.suffix_slots
        )

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """The evaluator: rollouts over whole sets, with the answer budget of evaluation."""
        evaluate = self.config.evaluate
        _, answer_slots = self.evaluated_answers
        rate = evaluate.dropout
        if rate is None:
            rate = self.config.dropout.rate
        policy = self.policy.with_config(
            answer_slots=answer_slots,
            dropout_rate=rate,
            temperature=evaluate.temperature,
            top_k=evaluate.top_k,
            top_p=evaluate.top_p,
        )
        # Evaluation has further buckets of prompts, at all multiples below the largest.
        step = evaluate.prompt_multiple
        slots = {*self.prompt_slots, *range(step, max(self.prompt_slots), step)}
        search = (evaluate.beams, evaluate.candidates)
        return Evaluator(
            policy,
            self.mesh,
            evaluate.batch_size,
            sorted(slots),
            self.key,
            evaluate.scorers,
            search,
        )

    def optimizer_config(
        self, section: str, total_steps: int, **overrides: Any
    ) -> OptimizerConfig:
        """Return `config.SECTION.optimizer`, checked; with `overrides` values instead of some of it."""
        shared = getattr(self.config, section).optimizer
        return merge_settings(
            shared,
            overrides,
            key=f"config.{section}.optimizer",
            total_steps=total_steps,
        )


def assemble(
    config: Config,
    workdir: Workdir | None = None,
    identity: Identity | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Setup:
    """Assemble everything that a config describes, except data sets, which are read when somebody asks for them.

    Args:
        workdir: whose finished stages may make up for what `config.init` lacks.
        identity: of `config.init`, if it was asked for already.
        devices: None is all there are.
    Raises:
        UserError: a key's value can't be used.
    """
    # Find what the run starts from.
    finished = workdir.finished_stages() if workdir else []
    read_with = config
    trains = not finished or not set(wanted_stages(config)) <= set(finished)
    if config.tokenizer == WORDS and workdir and not trains:
        # Once nothing is trained, the words are the workdir's, not those of the training data, which may be gone.
        read_with = merge_settings(config, {"tokenizer": str(workdir.reasoner)})
    checkpoint = find_checkpoint(read_with, identity, lambda: learned_from(config))
    template = checkpoint.template
    description = checkpoint.description
    model = description.model
    architecture = description.architecture
    run_checks.check_start(config, checkpoint, finished)
    # The config gets the loaded shapes, so that config.json says what was run.
    shapes = {}
    for name in vars(config.model):
        value = getattr(model, name, getattr(architecture, name, None))
        if value is not None:
            shapes[name] = value
    shapes["dtype"] = jnp.dtype(model.dtype).name
    config = merge_settings(config, {"model": shapes})
    if not xla_cpu.on_cpu():
        # What is float32 is computed in float32, not in a type with fewer bits that the device is quicker in.
        jax.config.update("jax_default_matmul_precision", "highest")
    # Make the policy, and the reward that judges its answers.
    reasoner = architecture.on(model)
    gate = stopping_gate(reasoner.width, config.gate.hidden, config.gate.detached)
    policy = _policy(config, template, reasoner, gate)
    answers = max(config.max_answer_tokens, config.evaluate.max_answer_tokens or 0)
    positions = model.n_positions - max(len(template.closing_ids) - 1, 0)
    reads = (template.answer_style, template.token_bytes, template.eos_ids)
    reward = Reward(
        config.weighted, *reads, config.reward_processes, config.reward_seconds
    )
    # Say how each part of the parameters is drawn, and which stages train it.
    key = jax.random.key(config.seed)
    reasoner_key, gate_key = jax.random.split(jax.random.fold_in(key, Stream.REASONER))
    changing_reasoner = {*REASONER_STAGES}
    if not config.cold_start.train_backbone:
        changing_reasoner.remove(COLD_START)
    changing_gate = {COLD_START}
    if config.gate.enabled:
        changing_gate.add(RL)
    if config.imitate.gate_weight:
        changing_gate.add(IMITATE)
    made = (
        Part(REASONER, reasoner_key, reasoner.init, frozenset(changing_reasoner)),
        Part(GATE, gate_key, gate.init, frozenset(changing_gate)),
        Part(
            LATENT_POLICY,
            jax.random.fold_in(key, Stream.LATENT_POLICY),
            policy.latent_policy.init,
            frozenset({RL}),
        ),
    )
    return Setup(
        config=config,
        mesh=device_mesh(devices, config.sharding.fsdp),
        key=key,
        checkpoint=checkpoint,
        prompt_slots=run_checks.fitting_slots(
            config.prompt_slots, config.max_latents, answers, positions, config.init
        ),
        parts=made,
        policy=policy,
        reward=reward,
    )


def _policy(
    config: Config, template: Template, reasoner: Reasoner, gate: Gate
) -> Policy:
    """Make the policy of rollouts.

    Raises:
        UserError: a text that should be one token is not.
    """
    try:
        closing_ids = template.closing_ids if config.prompt.closing else ()
        latent_policy = config.latent_policy.selected.with_ids(
            template.token, closing_ids
        )
    except UserError as error:
        key = f"config.latent_policy.{config.latent_policy.name}.end_text"
        raise UserError(f"{key}: {error}, or use config.prompt.closing") from None
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
    bound_latent_policy = latent_policy(reasoner.in_tree(), gate.in_tree())
    masked_reasoner = reasoner.in_tree().never_saying(template.impossible_ids)
    return Policy(
        masked_reasoner,
        bound_latent_policy,
        rollouts,
        layout="rows" if template.start_id is None else "packed",
    )
