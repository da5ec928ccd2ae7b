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
_BATCHES = ((8, 500), (16, 5_000), (32, 50_000), (128, math.inf))  # size, below so many problems


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
        enabled = self.or_given("gate.enabled", True) and self.or_given("max_latents", 1)
        return bool(enabled and self.architecture.has_gate and not self.latent_policy)


class Choice(NamedTuple):
    """A choice: values by dotted key, and why these."""

    values: dict[str, Any]
    why: str

    def __str__(self) -> str:
        return f"chosen: {', '.join(f'{key}={value!r}' for key, value in self.values.items())} ({self.why})"


def choices(measured: Measured) -> list[Choice]:
    """Choose everything that depends on lengths and sizes."""
    prompts, answer = measured.prompts, max(measured.answers)
    longest = f"the longest answer {answer} with its end"
    if answer == 1:
        answer, longest = _NO_ANSWER, f"none has an answer, for which there are {_NO_ANSWER}"
    if not measured.architecture.has_latents:
        answer = max(*measured.written, answer)
        longest = f"the longest solution {answer} with its answer"
    slots = measured.or_given("prompt_slots", buckets(prompts))
    budget = measured.or_given("max_answer_tokens", answer + 2)
    lengths = Choice(
        {"prompt_slots": slots, "max_answer_tokens": budget, "evaluate.prompt_multiple": max(slots)},
        f"the longest prompt has {max(prompts)} tokens, three of four up to {_quantile(prompts, 0.75)}; {longest}",
    )
    thought = thought_of(measured)
    latents = measured.or_given("max_latents", thought.values["max_latents"])
    return [*stages(measured), thought, lengths, *model(measured, latents, max(slots), budget), *schedule(measured)]


def stages(measured: Measured) -> list[Choice]:
    """Choose what is run, and how a reasoner without a gate is rewarded."""
    trained: list[str] = ["cold_start"] * measured.gated + ["rl", "evaluate"]
    if measured.latents:
        return [Choice({"stages": tuple(trained), **_ungated(measured)}, "the base is a latent reasoner already")]
    why = (
        "thoughts have no gate to train, and what differs is drawn"
        if measured.architecture.has_latents
        else "it has no gate"
    )
    return [] if measured.gated else [Choice({"stages": ("imitate", *trained), **_ungated(measured)}, why)]


def _ungated(measured: Measured) -> dict[str, Any]:
    """Choose for no gate; an architecture whose thoughts or answers are drawn is rewarded for what was drawn."""
    if measured.gated:
        return {}
    values: dict[str, Any] = {"gate.enabled": False}
    if not measured.latent_policy and measured.architecture.has_latents:
        return values
    values |= {"dropout.rate": 0.0, "rl.objectives": ("grpo",), "rl.temperature": 1.0}
    values["objective.grpo.reduction"] = "sum" if measured.latent_policy else "sequence_mean"
    return values | (
        {"latent_policy.name": measured.latent_policy} if measured.latent_policy else {"evaluate.temperature": 1.0}
    )


def thought_of(measured: Measured) -> Choice:
    """Choose the number of latents, and COCONUT's curriculum towards it, or what the architecture has instead."""
    if measured.latents:
        return Choice(
            {"max_latents": measured.latents, "min_latents": max(1, measured.latents // 4)}, "those of the base"
        )
    if not measured.architecture.has_latents:
        nothing = dict.fromkeys(("max_latents", "imitate.c_thought", "imitate.max_latent_stage"), 0)
        return Choice({**nothing, "min_latents": 1}, "it thinks in words")
    if measured.architecture.default_recipe == "adalr":
        return _adaptive(measured)
    if measured.latent_policy:
        speed = measured.or_given("prompt.speed", 2)
        usual = _quantile([w - a for w, a in zip(measured.written, measured.answers, strict=False)], 0.9)
        most = max(-(-usual // speed), 1)
        scale = {} if measured.parameters else {"model.scale": 0.2}  # near that of its embeddings, once trained
        why = f"the steps of nine of ten problems have up to {usual} tokens, {speed} of them a latent"
        return Choice({"max_latents": most, "min_latents": 1, "prompt.speed": speed, **scale}, why)
    usual, c_thought = _quantile(measured.steps, 0.9), 2 if measured.parameters else 1
    c_thought = measured.or_given("imitate.c_thought", c_thought)
    replaced = min(usual or 3, _MOST_STAGES, measured.or_given("max_latents", 99) // max(c_thought, 1))
    replaced = int(measured.or_given("imitate.max_latent_stage", replaced))
    most = max((1 + measured.gated) * c_thought * replaced, measured.or_given("min_latents", 1))
    most = measured.or_given("max_latents", most)
    method = "COCONUT's curriculum" if RECIPES[measured.architecture.default_recipe].has_stages else "imitation"
    why = (
        f"nine of ten problems have up to {usual} steps; {method} replaces {replaced}, each by {c_thought} "
        f"latent(s){', and the gate may take twice as many' if measured.gated else ''}"
    )
    values: dict[str, Any] = {
        "imitate.c_thought": c_thought, "imitate.max_latent_stage": replaced, "max_latents": most,
        "min_latents": max(1, most // 4), "imitate.final_latents": "published" if measured.parameters else "random",
    }  # fmt: skip
    values |= _distilled(measured, usual)
    return Choice(
        values, why if usual else "problems hardly have steps: answers alone are imitated, after some latents"
    )


def _adaptive(measured: Measured) -> Choice:
    """Choose one latent for each step and, on a pretrained model, AdaLR's five further ones."""
    usual = _quantile(measured.steps, 0.9)
    further = 5 if measured.parameters else 0
    most = measured.or_given("max_latents", max(further + usual, 1))
    values = {
        "max_latents": most,
        "min_latents": 1,
        "imitate.adalr.latents": further,
        "imitate.adalr.latents_a_step": 1,
        "imitate.adalr.most": most,
    }
    if usual:
        values |= _distilled(measured, usual)
    return Choice(values, f"nine of ten problems have up to {usual} steps; there are {further} latents and one a step")


def _distilled(measured: Measured, usual: int) -> dict[str, Any]:
    """Choose for an architecture that is its own teacher: it needs a step that is written, and has no stages."""
    recipe = measured.or_given("imitate.recipe", "") or measured.architecture.default_recipe
    if not RECIPES[recipe].has_teacher:
        return {}
    if not usual:
        return {"imitate.recipe": "curriculum"}
    values = {} if measured.parameters >= _LARGE else {f"imitate.{recipe}.distil_factor": 1.0}
    return values | ({f"imitate.{recipe}.last_step": True} if usual < 2 else {})


def model(measured: Measured, latents: int, slots: int, budget: int) -> list[Choice]:
    """Choose shapes for random weights; of a pretrained model, what it has room for.

    Args:
        latents, slots, budget: of thoughts, prompts and answers, at most.
    """
    needed = max(measured.prompts) + max(*measured.written, budget) + latents
    if not measured.parameters:
        shapes = {"n_layer": 2 if measured.problems < 1_000 else 4, "n_head": 2, "n_embd": 64}
        shapes["n_positions"] = _up(max(needed, slots + budget + latents), 64)
        return [Choice({f"model.{key}": value for key, value in shapes.items()}, "small, for random weights")]
    chosen = []
    if measured.parameters >= _LARGE:
        chosen.append(Choice({"model.remat": True, "model.scan_layers": True}, "a large model: memory before speed"))
    if needed > measured.positions:
        why = f"longer problems don't fit in its {measured.positions} positions with the latents"
        chosen.append(Choice({"imitate.max_tokens": measured.positions - latents}, why))
    return chosen


def schedule(measured: Measured) -> list[Choice]:
    """Choose batches, steps and rates, by the number of problems."""
    demonstrations, pretrained, large = len(measured.steps), measured.parameters > 0, measured.parameters >= _LARGE
    batch = next(size for size, most in _BATCHES if demonstrations < most)
    small, most = min(batch, 32), 20_000 if pretrained else 4_000

    def steps(epochs: int, size: int, n: int = measured.problems) -> int:
        return min(max(epochs * n // size, 20), most)

    def section(name: str, why: str, size: int, rate: float, **values: Any) -> Choice:
        micro = math.gcd(size, size // 8) if large else 1
        values |= {"batch_size": size, "micro_batches": micro, "optimizer.learning_rate": rate}
        return Choice({f"{name}.{key.replace('__', '.')}": value for key, value in values.items()}, why)

    chosen = []
    if not measured.latents:
        batch = measured.or_given("imitate.batch_size", batch)
        epochs = _epochs(measured)
        derived = {key: steps(count, batch, demonstrations) for key, count in epochs.items()}
        phases = {key: measured.or_given(f"imitate.{key}", count) for key, count in derived.items()}
        phases = dict.fromkeys(("cot_steps", "stage_steps", "final_steps"), 0) | phases
        least = min((count for count in phases.values() if count), default=0)
        many = ", ".join(map(str, epochs.values()))
        why = f"{many} epochs of {demonstrations:,} problems, 20 to {most:,} steps each, a tenth warm-up"
        rate = (2e-5 if large else 1e-4) if pretrained else 1e-3
        chosen.append(section(
            "imitate", why, batch, rate, **phases, optimizer__warmup_steps=least // 10,
            optimizer__schedule="linear", optimizer__final_fraction=0.1, suffix_slots=buckets(measured.written)[:-1],
        ))  # fmt: skip
    passes = 2 if pretrained else 10
    if measured.gated:
        size = measured.or_given("cold_start.batch_size", small)
        most_steps = measured.or_given("cold_start.steps", steps(passes, size))
        chosen.append(section(
            "cold_start", f"at most {passes} epochs", size, 3e-3, steps=most_steps,
            evaluate_every=max(most_steps // 4, 1), patience=2, optimizer__name="adamw",
        ))  # fmt: skip
    size = measured.or_given("rl.batch_size", small)
    most_steps, rl = measured.or_given("rl.steps", steps(passes, size)), "adafactor" if pretrained else "adamw"
    chosen.append(section(
        "rl", f"{passes} epochs", size, 1e-6 if pretrained else 3e-5, steps=most_steps, optimizer__name=rl,
        optimizer__warmup_steps=most_steps // 20, capacities=((1.0, 1.0),),
    ))  # fmt: skip
    evaluate = {"evaluate.batch_size": 64 if pretrained else 256, "evaluate.samples": 8, "evaluate.seeds": 1}
    chosen.append(Choice(evaluate | {"checkpoint_every": 200}, "a first look"))
    return [
        *chosen,
        Choice({"objective.slpo.latent_reduction": "mean"}, "so that the rate doesn't depend on max_latents"),
    ]


def _epochs(measured: Measured) -> dict[str, int]:
    """Return the epochs of the phases of imitation that there are."""
    epochs = {"cot_steps": 30, "stage_steps": 10, "final_steps": 40}
    if measured.parameters:
        epochs = {"cot_steps": 5, "stage_steps": 2, "final_steps": 5}
    if not measured.architecture.has_latents:
        return {"cot_steps": epochs["cot_steps"] + epochs["final_steps"]}
    if not _quantile(measured.steps, 0.9):
        return {"final_steps": epochs["final_steps"]}
    has_stages = RECIPES[measured.architecture.default_recipe].has_stages
    return {key: count for key, count in epochs.items() if has_stages or key != "stage_steps"}


def buckets(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return one bucket that holds all, and one that holds three of four where much smaller; multiples of 8."""
    usual, most = _up(_quantile(lengths, 0.75), 8), _up(max(lengths), 8)
    return (usual, most) if 4 * usual <= 3 * most else (most,)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _quantile(values: Sequence[int], share: float) -> int:
    return int(np.quantile(values, share, method="inverted_cdf"))
