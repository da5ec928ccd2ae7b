"""The optimizers against the Hugging Face trainer's, and their equations written out in numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from slpo_jax.errors import UserError
from slpo_jax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule, scaled

STEPS = 20
SHAPES = {
    "embedding": (160, 130),  # both axes above optax's default threshold for factoring
    "kernel": (24, 40),  # below it
    "tall": (150, 6),  # one axis below it
    "head": (16, 1),  # the gate's
    "bias": (40,),
    "scale": (),
}


def _problem(seed: int = 0) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """Parameters, and 20 steps of gradients of very different sizes, some of them below the clip and most above."""
    rng = np.random.default_rng(seed)
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    sizes = {name: 10.0 ** rng.uniform(-3, 0) for name in SHAPES}
    gradients = []
    for _ in range(STEPS):
        size = 10.0 ** rng.uniform(-3, 1)
        step = {name: rng.normal(size=shape) * np.exp(rng.normal(size=shape)) for name, shape in SHAPES.items()}
        gradients.append({name: (size * sizes[name] * g).astype(np.float32) for name, g in step.items()})
    norms = [np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in step.values())) for step in gradients]
    assert min(norms) < 1 < max(norms), "both sides of the clip must be tried"
    return params, gradients


def _run(
    optimizer: optax.GradientTransformation, params: dict[str, np.ndarray], gradients: list[dict[str, np.ndarray]]
) -> list[dict[str, np.ndarray]]:
    """The parameters after each step."""

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    current = jax.tree.map(jnp.asarray, params)
    state = optimizer.init(current)
    path = []
    for gradient in gradients:
        current, state = step(current, state, gradient)
        path.append(jax.tree.map(np.asarray, current))
    return path


def _numpy_adafactor(
    params: dict[str, np.ndarray],
    gradients: list[dict[str, np.ndarray]],
    rates: list[float],
    clip_norm: float = math.inf,
    weight_decay: float = 0.0,
) -> list[dict[str, np.ndarray]]:
    """Adafactor in float64: Shazeer & Stern 2018, algorithms 4 and 5, with an external rate and no momentum."""
    params = {name: value.astype(np.float64) for name, value in params.items()}
    moments: dict[str, list[np.ndarray]] = {}
    path = []
    for count, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        norm = math.sqrt(sum(float(np.sum(g.astype(np.float64) ** 2)) for g in gradient.values()))
        beta2 = 1 - count**-0.8
        for name, g in gradient.items():
            g = g.astype(np.float64) * min(1.0, clip_norm / norm)
            square = g**2 + 1e-30
            fresh = [square.sum(axis=1), square.sum(axis=0)] if g.ndim == 2 else [square]
            old = moments.get(name, [np.zeros_like(f) for f in fresh])
            moments[name] = [beta2 * o + (1 - beta2) * f for o, f in zip(old, fresh, strict=True)]
            if g.ndim == 2:
                row, column = moments[name]
                second = np.outer(row, column) / row.sum()
            else:
                (second,) = moments[name]
            update = g / np.sqrt(second)
            update = update / max(1.0, math.sqrt(np.mean(update**2)))
            decay = weight_decay if g.ndim == 2 else 0.0
            params[name] = params[name] - rate * update - rate * decay * params[name]
        path.append(dict(params))
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
            assert worst <= rtol * scale + rounding, f"{name} after {count} steps: off by {worst:.1e}"


def _config(**changes) -> OptimizerConfig:
    return OptimizerConfig(**({"name": "adafactor", "learning_rate": 0.02, "warmup_steps": 4} | changes))


def _rates(config: OptimizerConfig) -> list[float]:
    schedule = make_schedule(config)
    return [float(schedule(step)) for step in range(STEPS)]


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("clip_norm", [1.0, 0.05, None])
def test_adafactor_follows_its_equations(clip_norm, weight_decay):
    params, gradients = _problem()
    config = _config(clip_norm=clip_norm, weight_decay=weight_decay)
    expected = _numpy_adafactor(params, gradients, _rates(config), clip_norm or math.inf, weight_decay)
    _assert_paths_equal(_run(make_optimizer(config), params, gradients), expected, params)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_adafactor_is_the_hugging_face_trainers(weight_decay):
    """Which decays matrices alone, by two groups."""
    torch, optimization = pytest.importorskip("torch"), pytest.importorskip("transformers.optimization")
    params, gradients = _problem(seed=1)
    config, path = _config(weight_decay=weight_decay), []
    tensors = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in params.items()}
    matrices, vectors = ([t for t in tensors.values() if (t.ndim >= 2) == whole] for whole in (True, False))
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = optimization.Adafactor(groups, lr=1.0, scale_parameter=False, relative_step=False, clip_threshold=1.0)
    for gradient, rate in zip(gradients, _rates(config), strict=True):
        for name, tensor in tensors.items():
            tensor.grad = torch.tensor(gradient[name])
        torch.nn.utils.clip_grad_norm_(tensors.values(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        path.append({name: tensor.detach().numpy().copy() for name, tensor in tensors.items()})
    _assert_paths_equal(_run(make_optimizer(config), params, gradients), path, params)


@pytest.mark.parametrize("decay_vectors", [False, True])
def test_adamw_follows_its_equations(decay_vectors):
    """Loshchilov & Hutter 2019, algorithm 2, in float64."""
    params, gradients = _problem(seed=2)
    config = _config(name="adamw", weight_decay=0.1, decay_vectors=decay_vectors)
    now = {name: value.astype(np.float64) for name, value in params.items()}
    first, second, path = dict.fromkeys(now, 0.0), dict.fromkeys(now, 0.0), []
    for count, (gradient, rate) in enumerate(zip(gradients, _rates(config), strict=True), start=1):
        norm = math.sqrt(sum(float(np.sum(g.astype(np.float64) ** 2)) for g in gradient.values()))
        for name, g in gradient.items():
            g = g.astype(np.float64) / max(1.0, norm)
            first[name], second[name] = 0.9 * first[name] + 0.1 * g, 0.999 * second[name] + 0.001 * g**2
            update = first[name] / (1 - 0.9**count) / (np.sqrt(second[name] / (1 - 0.999**count)) + 1e-8)
            decay = 0.1 if g.ndim == 2 or decay_vectors else 0.0
            now[name] = now[name] - rate * (update + decay * now[name])
        path.append(dict(now))
    _assert_paths_equal(_run(make_optimizer(config), params, gradients), path, params)


def test_rates_of_their_own():
    """Each part follows the equations at its own rate, with gradients that are clipped over all of them together."""
    params, gradients = _problem(seed=3)
    config = _config(weight_decay=0.1, schedule="cosine", total_steps=STEPS + 1)
    factors = dict.fromkeys(params, 3.0) | {"bias": 10.0, "kernel": 0.5}
    found = _run(scaled(make_optimizer(config), factors), params, gradients)
    norms = [math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in each.values())) for each in gradients]
    expected: list[dict] = [{} for _ in gradients]
    for name, factor in factors.items():
        clipped = [{name: g[name] / max(1.0, norm)} for g, norm in zip(gradients, norms, strict=True)]
        rates = [factor * rate for rate in _rates(config)]
        own = _numpy_adafactor({name: params[name]}, clipped, rates, weight_decay=0.1)
        expected = [each | one for each, one in zip(expected, own, strict=True)]
    _assert_paths_equal(found, expected, params)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"warmup_steps": 4}, {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 2.0, 1000: 2.0}),
        ({"warmup_steps": 0}, {0: 2.0, 7: 2.0}),
        (
            {"schedule": "linear", "warmup_steps": 4, "total_steps": 12},
            {0: 0.0, 3: 1.5, 4: 2.0, 6: 1.5, 8: 1.0, 12: 0.0, 50: 0.0},
        ),
        (
            {"schedule": "linear", "warmup_steps": 0, "total_steps": 8, "final_fraction": 0.2},
            {0: 2.0, 2: 1.6, 4: 1.2, 8: 0.4, 9: 0.4},
        ),
        (  # 1 + cos of 0, 60, 90, 120 and 180 degrees
            {"schedule": "cosine", "warmup_steps": 4, "total_steps": 16},
            {0: 0.0, 3: 1.5, 4: 2.0, 8: 1.5, 10: 1.0, 12: 0.5, 16: 0.0, 50: 0.0},
        ),
    ],
)
def test_schedule_by_hand(changes, expected):
    schedule = make_schedule(_config(learning_rate=2.0, **changes))
    for step, rate in expected.items():
        assert float(schedule(step)) == pytest.approx(rate, rel=1e-6, abs=1e-9), step


@pytest.mark.parametrize("changes", [{"warmup_steps": 5}, {"schedule": "linear", "warmup_steps": 4}])
def test_a_warm_up_that_is_longer_than_the_run_is_refused(changes):
    with pytest.raises(UserError, match=r"OptimizerConfig\.warmup_steps: [45] is not valid") as error:
        _config(total_steps=4, **changes)
    assert "\n" not in str(error.value)
    assert _config(warmup_steps=4, total_steps=4).warmup_steps == 4
