"""Settings by the data's size and lengths, and by the model's: pure functions, each with the reason in words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from slpo_jax.architectures import PLAIN, Architecture
from slpo_jax.policy.latent_policies import own_of
from slpo_jax.training.recipes import RECIPES

_MOST_STAGES = 6  # of COCONUT's curriculum, as for ProsQA
_LARGE = 500_000_000  # parameters from which on memory is saved, and rates are lower
_NO_ANSWER = 14  # tokens, where nobody knows how long they are
# The size of a batch, and the number of problems below which it is used.
_BATCHES = (
    (8, 500),
    (16, 5_000),
    (32, 50_000),
    (128, math.inf),
)


@dataclass(frozen=True)
class Measured:
    """The measures that settings are chosen from; lengths are in tokens.

    Attributes:
        problems: training problems.
        steps: steps of each of those that are imitated.
        prompts: lengths of the prompts of all sets.
        answers: lengths of their answers, end included.
        written: lengths of these steps and answers.
        parameters: of the pretrained model; 0 for random weights.
        positions: that it has; 0 for as many as are needed.
        latents: T of a reasoner that needs no imitation; 0 for a model that is none yet.
        architecture: of the reasoner.
        given: what the user has set, by key of the config: all else follows from it.
    """

    problems: int
    steps: Sequence[int]
    prompts: Sequence[int]
    answers: Sequence[int]
    written: Sequence[int]
    parameters: int = 0
    positions: int = 0
    latents: int = 0
    architecture: type[Architecture] = PLAIN
    given: Mapping[str, Any] = field(default_factory=dict)

    def or_given(self, key: str, chosen: Any) -> Any:
        """Return what the key is going to be: what is given, else `chosen`."""
        return self.given.get(key, chosen)

    @property
    def latent_policy(self) -> str:
        """The law of a thought that is this architecture's alone; "" where it has none."""
        return own_of(self.architecture.name)

    @property
    def gated(self) -> bool:
        """Whether a gate is trained: not where thoughts end otherwise."""
        is_wanted = self.or_given("gate.enabled", True)
        thinks = self.or_given("max_latents", 1)
        has_gate = self.architecture.has_gate and not self.latent_policy
        return bool(is_wanted and thinks and has_gate)


class Choice(NamedTuple):
    """A choice: values by dotted key, and why these."""

    values: dict[str, Any]
    why: str

    def __str__(self) -> str:
        settings = [f"{key}={value!r}" for key, value in self.values.items()]
        return f"chosen: {', '.join(settings)} ({self.why})"


def choices(measured: Measured) -> list[Choice]:
    """Choose everything that depends on lengths and sizes."""
    # Slots are for the longest prompt and answer; where nothing is known of answers, for a usual one.
    prompts = measured.prompts
    answer = max(measured.answers)
    longest = f"the longest answer {answer} with its end"
    if answer == 1:
        answer = _NO_ANSWER
        longest = f"none has an answer, for which there are {_NO_ANSWER}"
    if not measured.architecture.has_latents:
        answer = max(*measured.written, answer)
        longest = f"the longest solution {answer} with its answer"
    slots = measured.or_given("prompt_slots", buckets(prompts))
    budget = measured.or_given("max_answer_tokens", answer + 2)
    lengths = Choice(
        {
            "prompt_slots": slots,
            "max_answer_tokens": budget,
            "evaluate.prompt_multiple": max(slots),
        },
        f"the longest prompt has {max(prompts)} tokens, three of four up to {_quantile(prompts, 0.75)}; {longest}",
    )
    thought = thought_of(measured)
    latents = measured.or_given("max_latents", thought.values["max_latents"])
    return [
        *stages(measured),
        thought,
        lengths,
        *model(measured, latents, max(slots), budget),
        *schedule(measured),
    ]


def stages(measured: Measured) -> list[Choice]:
    """Choose what is run, and how a reasoner without a gate is rewarded."""
    if measured.latents:
        trained: tuple[str, ...] = ("cold_start", "rl", "evaluate")
        if not measured.gated:
            trained = ("rl", "evaluate")
        values = {"stages": trained, **_choose_without_gate(measured)}
        return [Choice(values, "the base is a latent reasoner already")]
    # The default stages are all of them, with a gate.
    if measured.gated:
        return []
    why = "it has no gate"
    if measured.architecture.has_latents:
        why = "thoughts have no gate to train, and what differs is drawn"
    trained = ("imitate", "rl", "evaluate")
    return [Choice({"stages": trained, **_choose_without_gate(measured)}, why)]


def _choose_without_gate(measured: Measured) -> dict[str, Any]:
    """Choose for no gate; an architecture whose thoughts or answers are drawn is rewarded for what was drawn."""
    if measured.gated:
        return {}
    values: dict[str, Any] = {"gate.enabled": False}
    if not measured.latent_policy and measured.architecture.has_latents:
        return values
    values["dropout.rate"] = 0.0
    values["rl.objectives"] = ("grpo",)
    values["rl.temperature"] = 1.0
    if measured.latent_policy:
        values["objective.grpo.reduction"] = "sum"
        values["latent_policy.name"] = measured.latent_policy
    else:
        values["objective.grpo.reduction"] = "sequence_mean"
        values["evaluate.temperature"] = 1.0
    return values


def thought_of(measured: Measured) -> Choice:
    """Choose the number of latents, and COCONUT's curriculum towards it, or what the architecture has instead."""
    if measured.latents:
        values = {
            "max_latents": measured.latents,
            "min_latents": max(1, measured.latents // 4),
        }
        return Choice(values, "those of the base")
    if not measured.architecture.has_latents:
        values = {
            "max_latents": 0,
            "imitate.c_thought": 0,
            "imitate.max_latent_stage": 0,
            "min_latents": 1,
        }
        return Choice(values, "it thinks in words")
    if measured.architecture.further_latents:
        return _choose_adaptive(measured)
    if measured.latent_policy:
        return _choose_compressed(measured)
    return _choose_curriculum(measured)


def _choose_compressed(measured: Measured) -> Choice:
    """Choose latents that stand for some tokens each, as CoLaR's do."""
    speed = measured.or_given("prompt.speed", 2)
    pairs = zip(measured.written, measured.answers, strict=False)
    usual = _quantile([written - answer for written, answer in pairs], 0.9)
    values: dict[str, Any] = {
        "max_latents": max(-(-usual // speed), 1),
        "min_latents": 1,
        "prompt.speed": speed,
    }
    # The unit of a latent is near the size of its embeddings, once these are trained.
    if not measured.parameters:
        values["model.scale"] = 0.2
    why = f"the steps of nine of ten problems have up to {usual} tokens, {speed} of them a latent"
    return Choice(values, why)


def _choose_curriculum(measured: Measured) -> Choice:
    """Choose latents that replace steps one by one, and with a gate room for twice as many."""
    # Replace as many steps as most problems have, in a few stages, within the latents that are given.
    usual = _quantile(measured.steps, 0.9)
    c_thought = 2 if measured.parameters else 1
    c_thought = measured.or_given("imitate.c_thought", c_thought)
    room = measured.or_given("max_latents", 99) // max(c_thought, 1)
    replaced = min(usual or 3, _MOST_STAGES, room)
    replaced = int(measured.or_given("imitate.max_latent_stage", replaced))
    most = c_thought * replaced
    if measured.gated:
        most *= 2
    most = max(most, measured.or_given("min_latents", 1))
    most = measured.or_given("max_latents", most)
    # Say so.
    method = "imitation"
    if RECIPES[measured.architecture.default_recipe].has_stages:
        method = "COCONUT's curriculum"
    why = (
        f"nine of ten problems have up to {usual} steps; {method} replaces {replaced}, each by {c_thought} "
        "latent(s)"
    )
    if measured.gated:
        why += ", and the gate may take twice as many"
    if not usual:
        why = (
            "problems hardly have steps: answers alone are imitated, after some latents"
        )
    values: dict[str, Any] = {
        "imitate.c_thought": c_thought,
        "imitate.max_latent_stage": replaced,
        "max_latents": most,
        "min_latents": max(1, most // 4),
        "imitate.final_latents": "published" if measured.parameters else "random",
    }
    values |= _choose_distillation(measured, usual)
    return Choice(values, why)


def _choose_adaptive(measured: Measured) -> Choice:
    """Choose one latent for each step and, on a pretrained model, the architecture's further ones."""
    usual = _quantile(measured.steps, 0.9)
    further = measured.architecture.further_latents if measured.parameters else 0
    most = measured.or_given("max_latents", max(further + usual, 1))
    values = {
        "max_latents": most,
        "min_latents": 1,
        "imitate.adalr.latents": further,
        "imitate.adalr.latents_a_step": 1,
        "imitate.adalr.most": most,
    }
    if usual:
        values |= _choose_distillation(measured, usual)
    why = f"nine of ten problems have up to {usual} steps; there are {further} latents and one a step"
    return Choice(values, why)


def _choose_distillation(measured: Measured, usual: int) -> dict[str, Any]:
    """Choose for an architecture that is its own teacher: it needs a step that is written, and has no stages."""
    recipe = measured.or_given("imitate.recipe", "")
    recipe = recipe or measured.architecture.default_recipe
    if not RECIPES[recipe].has_teacher:
        return {}
    if not usual:
        return {"imitate.recipe": "curriculum"}
    values = dict[str, Any]()
    if measured.parameters < _LARGE:
        values[f"imitate.{recipe}.distil_factor"] = 1.0
    # The teacher leaves out its last step, unless most problems have no other.
    if usual < 2:
        values[f"imitate.{recipe}.last_step"] = True
    return values


def model(measured: Measured, latents: int, slots: int, budget: int) -> list[Choice]:
    """Choose shapes for random weights; of a pretrained model, what it has room for.

    Args:
        latents, slots, budget: of thoughts, prompts and answers, at most.
    """
    needed = max(measured.prompts) + max(*measured.written, budget) + latents
    if not measured.parameters:
        shapes = {
            "model.n_layer": 2 if measured.problems < 1_000 else 4,
            "model.n_head": 2,
            "model.n_embd": 64,
            "model.n_positions": _round_up(max(needed, slots + budget + latents), 64),
        }
        return [Choice(shapes, "small, for random weights")]
    chosen = []
    if measured.parameters >= _LARGE:
        values = {"model.remat": True, "model.scan_layers": True}
        chosen.append(Choice(values, "a large model: memory before speed"))
    if needed > measured.positions:
        why = f"longer problems don't fit in its {measured.positions} positions with the latents"
        chosen.append(Choice({"imitate.max_tokens": measured.positions - latents}, why))
    return chosen


def schedule(measured: Measured) -> list[Choice]:
    """Choose batches, steps and rates, by the number of problems."""
    demonstrations = len(measured.steps)
    pretrained = measured.parameters > 0
    large = measured.parameters >= _LARGE
    batch = next(size for size, most in _BATCHES if demonstrations < most)
    small = min(batch, 32)
    most = 20_000 if pretrained else 4_000

    def steps(epochs: int, size: int, n: int = measured.problems) -> int:
        return min(max(epochs * n // size, 20), most)

    def section(name: str, why: str, size: int, rate: float, **values: Any) -> Choice:
        """Choose for a stage; __ in a key stands for a dot."""
        settings = dict[str, Any]()
        for key, value in values.items():
            settings[f"{name}.{key.replace('__', '.')}"] = value
        settings[f"{name}.batch_size"] = size
        settings[f"{name}.micro_batches"] = math.gcd(size, size // 8) if large else 1
        settings[f"{name}.optimizer.learning_rate"] = rate
        return Choice(settings, why)

    chosen = []
    # Imitation has phases of some epochs each, and warms up for a tenth of the shortest.
    if not measured.latents:
        batch = measured.or_given("imitate.batch_size", batch)
        epochs = _epochs(measured)
        phases = dict.fromkeys(("cot_steps", "stage_steps", "final_steps"), 0)
        for key, count in epochs.items():
            derived = steps(count, batch, demonstrations)
            phases[key] = measured.or_given(f"imitate.{key}", derived)
        least = min((count for count in phases.values() if count), default=0)
        many = ", ".join(map(str, epochs.values()))
        rate = 1e-3
        if pretrained:
            rate = 2e-5 if large else 1e-4
        imitation = section(
            "imitate",
            f"{many} epochs of {demonstrations:,} problems, 20 to {most:,} steps each, a tenth warm-up",
            batch,
            rate,
            **phases,
            optimizer__warmup_steps=least // 10,
            optimizer__schedule="linear",
            optimizer__final_fraction=0.1,
            suffix_slots=buckets(measured.written)[:-1],
        )
        chosen.append(imitation)
    # The gate's training stops when validation no longer improves.
    passes = 2 if pretrained else 10
    if measured.gated:
        size = measured.or_given("cold_start.batch_size", small)
        most_steps = measured.or_given("cold_start.steps", steps(passes, size))
        cold_start = section(
            "cold_start",
            f"at most {passes} epochs",
            size,
            3e-3,
            steps=most_steps,
            evaluate_every=max(most_steps // 4, 1),
            patience=2,
            optimizer__name="adamw",
        )
        chosen.append(cold_start)
    # Pretrained models learn by small steps, and Adafactor saves their memory.
    size = measured.or_given("rl.batch_size", small)
    most_steps = measured.or_given("rl.steps", steps(passes, size))
    rewards = section(
        "rl",
        f"{passes} epochs",
        size,
        1e-6 if pretrained else 3e-5,
        steps=most_steps,
        optimizer__name="adafactor" if pretrained else "adamw",
        optimizer__warmup_steps=most_steps // 20,
        capacities=((1.0, 1.0),),
    )
    chosen.append(rewards)
    evaluate = {
        "evaluate.batch_size": 64 if pretrained else 256,
        "evaluate.samples": 8,
        "evaluate.seeds": 1,
        "checkpoint_every": 200,
    }
    chosen.append(Choice(evaluate, "a first look"))
    reduction = {"objective.slpo.latent_reduction": "mean"}
    why = "so that the rate doesn't depend on max_latents"
    chosen.append(Choice(reduction, why))
    return chosen


def _epochs(measured: Measured) -> dict[str, int]:
    """Return the epochs of the phases of imitation that there are."""
    epochs = {"cot_steps": 30, "stage_steps": 10, "final_steps": 40}
    if measured.parameters:
        epochs = {"cot_steps": 5, "stage_steps": 2, "final_steps": 5}
    if not measured.architecture.has_latents:
        return {"cot_steps": epochs["cot_steps"] + epochs["final_steps"]}
    if not _quantile(measured.steps, 0.9):
        return {"final_steps": epochs["final_steps"]}
    if not RECIPES[measured.architecture.default_recipe].has_stages:
        del epochs["stage_steps"]
    return epochs


def buckets(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return one bucket that holds all, and one that holds three of four where much smaller; multiples of 8."""
    usual = _round_up(_quantile(lengths, 0.75), 8)
    most = _round_up(max(lengths), 8)
    return (usual, most) if 4 * usual <= 3 * most else (most,)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _quantile(values: Sequence[int], share: float) -> int:
    return int(np.quantile(values, share, method="inverted_cdf"))
