"""The optimizers against those of torch and the Hugging Face trainer, schedules by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from slpo_jax.training.optimizer import (
    OptimizerConfig,
    make_optimizer,
    make_schedule,
    scale_rates,
)

STEPS = 20
SHAPES = {
    "embedding": (160, 130),  # both axes above optax's default threshold for factoring
    "kernel": (24, 40),  # below it
    "tall": (150, 6),  # one axis below it
    "head": (16, 1),  # the gate's
    "bias": (40,),
    "scale": (),
}


def _problem(
    seed: int = 0,
) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """Parameters, and 20 steps of gradients of very different sizes, some of them below the clip and most above."""
    rng = np.random.default_rng(seed)
    params = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    sizes = {name: 10.0 ** rng.uniform(-3, 0) for name in SHAPES}
    gradients = []
    for _ in range(STEPS):
        size = 10.0 ** rng.uniform(-3, 1)
        step = {
            name: rng.normal(size=shape) * np.exp(rng.normal(size=shape))
            for name, shape in SHAPES.items()
        }
        gradients.append(
            {
                name: (size * sizes[name] * g).astype(np.float32)
                for name, g in step.items()
            }
        )
    norms = [
        np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in step.values()))
        for step in gradients
    ]
    assert min(norms) < 1 < max(norms), "both sides of the clip must be tried"
    return params, gradients


def _run(optimizer, params, gradients) -> list[dict[str, np.ndarray]]:
    """The parameters after each step."""

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    current = jax.tree.map(jnp.asarray, params)
    path = []
    state = optimizer.init(current)
    for gradient in gradients:
        current, state = step(current, state, gradient)
        path.append(jax.tree.map(np.asarray, current))
    return path


def _torch_run(config, params, gradients, factors=None) -> list[dict[str, np.ndarray]]:
    """The same by torch, in float64: groups of parameters have decay and rate of their own."""
    torch = pytest.importorskip("torch")
    optimization = pytest.importorskip("transformers.optimization")
    tensors = {
        name: torch.nn.Parameter(torch.tensor(value).double())
        for name, value in params.items()
    }
    groups = [
        {"params": [tensor], "factor": (factors or {}).get(name, 1.0),
         "weight_decay": config.weight_decay * (tensor.ndim >= 2 or config.decay_vectors)}
        for name, tensor in tensors.items()
    ]  # fmt: skip
    kind = torch.optim.AdamW
    more = {}
    if config.name == "adafactor":
        kind = optimization.Adafactor
        more = dict(scale_parameter=False, relative_step=False, clip_threshold=1.0)
    optimizer = kind(groups, lr=1.0, **more)
    schedule = make_schedule(config)
    path = []
    for count, gradient in enumerate(gradients):
        for name, tensor in tensors.items():
            tensor.grad = torch.tensor(gradient[name]).double()
        torch.nn.utils.clip_grad_norm_(tensors.values(), config.clip_norm or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = group["factor"] * float(schedule(count))
        optimizer.step()
        path.append(
            {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}
        )
    return path


def _assert_paths_equal(actual, expected, start, rtol=2e-5):
    """Equal in what was added to the start, which is small beside the start itself."""
    for count, (a, e) in enumerate(zip(actual, expected, strict=True), start=1):
        for name in SHAPES:
            moved = np.asarray(e[name], np.float64) - start[name]
            # The tolerance is a share of how far the array has moved; 2e-7 is float32's rounding of the sum.
            scale = np.abs(moved).max()
            worst = np.abs(np.asarray(a[name], np.float64) - start[name] - moved).max()
            rounding = 2e-7 * count * max(1.0, np.abs(start[name]).max())
            assert worst <= rtol * scale + rounding, (
                f"{name} after {count} steps: off by {worst:.1e}"
            )


def _config(**changes) -> OptimizerConfig:
    return OptimizerConfig(
        **({"name": "adafactor", "learning_rate": 0.02, "warmup_steps": 4} | changes)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weight_decay": 0.3},
        {"weight_decay": 0.3, "clip_norm": None},
        {"name": "adamw", "weight_decay": 0.1},
        {"name": "adamw", "weight_decay": 0.1, "decay_vectors": True},
    ],
    ids=str,
)
def test_steps_are_torch_s(changes):
    """As the Hugging Face trainer makes them: matrices alone are decayed, unless all are to be."""
    params, gradients = _problem()
    config = _config(**changes)
    found = _run(make_optimizer(config), params, gradients)
    _assert_paths_equal(found, _torch_run(config, params, gradients), params)


def test_rates_of_their_own():
    """Of each part, with gradients that are clipped over all of them together."""
    params, gradients = _problem(seed=3)
    config = _config(weight_decay=0.1, schedule="cosine", total_steps=STEPS + 1)
    factors = dict.fromkeys(params, 3.0) | {"bias": 10.0, "kernel": 0.5}
    found = _run(scale_rates(make_optimizer(config), factors), params, gradients)
    _assert_paths_equal(found, _torch_run(config, params, gradients, factors), params)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 2.0, 1000: 2.0}),
        ({"warmup_steps": 0}, {0: 2.0, 7: 2.0}),
        (
            {"schedule": "linear", "total_steps": 12},
            {0: 0.0, 3: 1.5, 4: 2.0, 6: 1.5, 8: 1.0, 12: 0.0, 50: 0.0},
        ),
        (
            {
                "schedule": "linear",
                "warmup_steps": 0,
                "total_steps": 8,
                "final_fraction": 0.2,
            },
            {0: 2.0, 2: 1.6, 9: 0.4},
        ),
        # 1 + cos of 0, 60, 90, 120 and 180 degrees
        (
            {"schedule": "cosine", "total_steps": 16},
            {0: 0.0, 3: 1.5, 4: 2, 8: 1.5, 10: 1, 12: 0.5, 16: 0, 50: 0.0},
        ),
    ],
)
def test_schedule_by_hand(changes, expected):
    schedule = make_schedule(_config(learning_rate=2.0, **changes))
    for step, rate in expected.items():
        assert float(schedule(step)) == pytest.approx(rate, rel=1e-6, abs=1e-9), step
