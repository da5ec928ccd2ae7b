"""Settings by the data's size and lengths, and by the model's: pure functions, each with the reason in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

_MOST_STAGES = 6  # of COCONUT's curriculum, as for ProsQA
_LARGE = 500_000_000  # parameters from which on memory is saved, and rates are lower
_BATCHES = ((8, 500), (16, 5_000), (32, 50_000), (128, math.inf))  # size, below so many problems


@dataclass(frozen=True)
class Measured:
    """What settings are chosen from; lengths are in tokens.

    Attributes:
        problems: training problems.
        steps: steps of each of them.
        prompts: lengths of the prompts of all sets.
        answers: lengths of their answers, end included.
        written: lengths of the training problems' steps and answers.
        parameters: of the pretrained model; 0 for random weights.
        positions: that it has; 0 for as many as are needed.
        latents: T of a reasoner that needs no imitation; 0 for a model that is none yet.
    """

    problems: int
    steps: Sequence[int]
    prompts: Sequence[int]
    answers: Sequence[int]
    written: Sequence[int]
    parameters: int = 0
    positions: int = 0
    latents: int = 0


class Choice(NamedTuple):
    """Values by dotted key, and why these."""

    values: dict[str, Any]
    why: str

    def __str__(self) -> str:
        return f"chosen: {', '.join(f'{key}={value!r}' for key, value in self.values.items())} ({self.why})"


def choices(measured: Measured) -> list[Choice]:
    """Everything that depends on lengths and sizes."""
    prompts, answer = measured.prompts, max(measured.answers)
    slots = buckets(prompts)
    lengths = Choice(
        {"prompt_slots": slots, "max_answer_tokens": answer + 2, "evaluate.prompt_multiple": max(slots)},
        f"the longest prompt has {max(prompts)} tokens, three of four up to {_quantile(prompts, 0.75)}; the longest "
        f"answer {answer} with its end",
    )
    thought = thought_of(measured)
    return [thought, lengths, *model(measured, thought.values["max_latents"]), *schedule(measured)]


def thought_of(measured: Measured) -> Choice:
    """The number of latents, and COCONUT's curriculum towards it."""
    if measured.latents:
        values = {"stages": ("cold_start", "rl", "evaluate"), "max_latents": measured.latents}
        return Choice(values | {"min_latents": max(1, measured.latents // 4)}, "the base is a latent reasoner already")
    usual = _quantile(measured.steps, 0.9)
    stages, c_thought = min(usual or 3, _MOST_STAGES), 2 if measured.parameters else 1
    most = 2 * c_thought * stages
    why = (
        f"nine of ten problems have up to {usual} steps; COCONUT's curriculum replaces {stages}, each by {c_thought} "
        "latent(s), and the gate may take twice as many"
    )
    values = {
        "imitate.c_thought": c_thought, "imitate.max_latent_stage": stages, "max_latents": most,
        "min_latents": max(1, most // 4), "imitate.final_latents": "published" if measured.parameters else "random",
    }  # fmt: skip
    return Choice(
        values, why if usual else "problems hardly have steps: answers alone are imitated, after some latents"
    )


def model(measured: Measured, latents: int) -> list[Choice]:
    """Shapes for random weights; of a pretrained model, what it has room for."""
    needed = max(measured.prompts) + max(*measured.written, max(measured.answers) + 2) + latents
    if not measured.parameters:
        shapes = {"n_layer": 2 if measured.problems < 1_000 else 4, "n_head": 2, "n_embd": 64}
        shapes["n_positions"] = _up(
            max(needed, max(buckets(measured.prompts)) + max(measured.answers) + 2 + latents), 64
        )
        return [Choice({f"model.{key}": value for key, value in shapes.items()}, "small, for random weights")]
    found = []
    if measured.parameters >= _LARGE:
        found.append(Choice({"model.remat": True, "model.scan_layers": True}, "a large model: memory before speed"))
    if needed > measured.positions:
        why = f"longer problems don't fit in its {measured.positions} positions with the latents"
        found.append(Choice({"imitate.max_tokens": measured.positions - latents}, why))
    return found


def schedule(measured: Measured) -> list[Choice]:
    """Batches, steps and rates, by the number of problems."""
    n, pretrained, large = measured.problems, measured.parameters > 0, measured.parameters >= _LARGE
    batch = next(size for size, most in _BATCHES if n < most)
    small, most = min(batch, 32), 20_000 if pretrained else 4_000

    def steps(epochs: int, size: int) -> int:
        return min(max(epochs * n // size, 20), most)

    def section(name: str, why: str, size: int, rate: float, **values: Any) -> Choice:
        micro = size // 8 if large else 1
        values |= {"batch_size": size, "micro_batches": micro, "optimizer.learning_rate": rate}
        return Choice({f"{name}.{key.replace('__', '.')}": value for key, value in values.items()}, why)

    chosen = []
    if not measured.latents:
        epochs = (
            {"cot_steps": 5, "stage_steps": 2, "final_steps": 5}
            if pretrained
            else {"cot_steps": 30, "stage_steps": 10, "final_steps": 40}
        )
        phases = {key: steps(count, batch) for key, count in epochs.items()}
        if not _quantile(measured.steps, 0.9):
            phases |= {"cot_steps": 0, "stage_steps": 0}
        least = min(count for count in phases.values() if count)
        many = ", ".join(map(str, epochs.values()))
        why = f"{many} epochs of {n:,} problems, 20 to {most:,} steps each, a tenth warm-up"
        rate = (2e-5 if large else 1e-4) if pretrained else 1e-3
        chosen.append(section(
            "imitate", why, batch, rate, **phases, optimizer__warmup_steps=least // 10, optimizer__schedule="linear",
            optimizer__final_fraction=0.1, suffix_slots=buckets(measured.written)[:-1],
        ))  # fmt: skip
    passes = 2 if pretrained else 10
    taken, rl = steps(passes, small), "adafactor" if pretrained else "adamw"
    chosen.append(section(
        "cold_start", f"at most {passes} epochs", small, 3e-3, steps=taken, evaluate_every=max(taken // 4, 1),
        patience=2, optimizer__name="adamw",
    ))  # fmt: skip
    chosen.append(section(
        "rl", f"{passes} epochs", small, 1e-6 if pretrained else 3e-5, steps=taken, optimizer__name=rl,
        optimizer__warmup_steps=taken // 20, capacities=((1.0, 1.0),),
    ))  # fmt: skip
    evaluate = {"evaluate.batch_size": 64 if pretrained else 256, "evaluate.samples": 8, "evaluate.seeds": 1}
    chosen.append(Choice(evaluate | {"checkpoint_every": 200}, "a first look"))
    return [
        *chosen,
        Choice({"objective.slpo.latent_reduction": "mean"}, "so that the rate doesn't depend on max_latents"),
    ]


def buckets(lengths: Sequence[int]) -> tuple[int, ...]:
    """One that holds all, and one that holds three of four where that is much smaller; multiples of 8."""
    usual, most = _up(_quantile(lengths, 0.75), 8), _up(max(lengths), 8)
    return (usual, most) if 4 * usual <= 3 * most else (most,)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _quantile(values: Sequence[int], share: float) -> int:
    return int(np.quantile(values, share, method="inverted_cdf"))
