"""What the machine can do, measured in JAX: matrix products at several shapes, and traffic to memory."""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = ("float32", "bfloat16")
# No powers of two on the CPU: their rows fall on the same lines of its caches, at a third of the rate.
SQUARES = {"cpu": (2000, 3000), "gpu": (4096, 8192)}
STREAM_BYTES = {"cpu": 2**28, "gpu": 2**31}  # of each array; caches hold tens of MB
CHAIN_FLOPS = {"cpu": 2e9, "gpu": 2e12}  # of a program of the model's products, so that its start does not count
SECONDS, LEAST_RUNS = 1.0, 3


def machine_rates(squares: tuple[int, ...] | None = None, stream_bytes: int | None = None) -> dict[str, Any]:
    """Rates of one device at work that suits it. Devices of the CPU share its cores: one's rate is that of all.

    Args:
        squares: sides of the square products; default: `SQUARES`.
        stream_bytes: size of each of the two arrays of the stream; default: `STREAM_BYTES`.
    Returns:
        "matmul": dtype -> its fastest square product, {"size", "best", "median"} in FLOP/s;
        "squares": dtype -> side -> {"best", "median"};
        "bandwidth": {"best", "median"} in bytes/s.
    """
    where = _backend()
    found = {dtype: {n: square_rate(n, dtype) for n in squares or SQUARES[where]} for dtype in DTYPES}
    fastest = {dtype: max(rates.items(), key=lambda item: item[1]["best"]) for dtype, rates in found.items()}
    return {
        "matmul": {dtype: {"size": size, **rate} for dtype, (size, rate) in fastest.items()},
        "squares": {dtype: {str(n): rate for n, rate in rates.items()} for dtype, rates in found.items()},
        "bandwidth": bandwidth(stream_bytes or STREAM_BYTES[where]),
    }


def matmul_rate(dtype: str) -> float:
    """FLOP/s of one device's fastest square product."""
    return max(square_rate(size, dtype)["best"] for size in SQUARES[_backend()])


def chip_count(shards: int) -> int:
    """How many times one device's rates a mesh of this size has."""
    return 1 if _backend() == "cpu" else shards


def square_rate(size: int, dtype: str) -> dict[str, float]:
    """FLOP/s of [size x size] @ [size x size] at jax's default precision: 2 size^3 a product."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), dtype) for i in range(2))
    return _rate(2.0 * size**3, jax.jit(jnp.matmul), a, b)


def feed_forward_rate(rows: int, width: int, layers: int, dtype: str) -> dict[str, float]:
    """FLOP/s of [rows x D] @ [D x 4D] and [rows x 4D] @ [4D x D], in turns over the layers' own weights.

    Each layer's second matrix is the inverse of its first, so that the values stay what they were.
    """
    rng = np.random.default_rng(0)
    columns = np.linalg.qr(rng.normal(size=(4 * width, width)))[0]
    ups = [columns.T[:, rng.permutation(4 * width)] for _ in range(layers)]
    weights = [(jnp.asarray(up, dtype), jnp.asarray(up.T, dtype)) for up in ups]
    flops = layers * 2 * 2.0 * rows * width * 4 * width
    repeats = max(1, round(CHAIN_FLOPS[_backend()] / flops))

    def once(x, weights):
        for up, down in weights:
            x = x @ up @ down
        return x

    chain = jax.jit(lambda x, weights: jax.lax.fori_loop(0, repeats, lambda _, x: once(x, weights), x))
    return _rate(repeats * flops, chain, jax.random.normal(jax.random.key(1), (rows, width), dtype), weights)


def bandwidth(array_bytes: int) -> dict[str, float]:
    """Bytes/s of a <- a + s b in place, float32: two arrays are read and one is written."""
    size = array_bytes // 4
    axpy = jax.jit(lambda a, b: a + 1.5 * b, donate_argnums=0)
    b, state = jnp.ones(size), [jnp.ones(size)]

    def run():
        state[0] = axpy(state[0], b)
        return state[0]

    return _rate(3.0 * 4 * size, run)


def _backend() -> str:
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


def _rate(amount: float, function, *args) -> dict[str, float]:
    """Amount a second: of the fastest run, and of the median one, after one that compiles."""
    seconds: list[float] = []
    jax.block_until_ready(function(*args))
    while len(seconds) < LEAST_RUNS or sum(seconds) < SECONDS:
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - start)
    return {"best": amount / min(seconds), "median": amount / statistics.median(seconds)}
