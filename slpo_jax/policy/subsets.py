"""Subsets of rollouts: of a group in training, of a problem's samples in reports, which do without jax."""

from typing import Any


def solved_share(n: int, right: Any, k: int) -> Any:
    """rho(n, c, k) = 1 - C(n - c, k) / C(n, k): the share of the subsets of k of n that hold one of the c right.

    A product of k factors, which stays in [0, 1] where binomials would overflow.

    Args:
        n, k: 0 <= k <= n; an empty subset holds none.
        right: c, [..], of jax or numpy, in whose precision it is computed.
    """
    missed: Any = 1.0
    for j in range(k):
        wrong = n - right - j
        missed = missed * (wrong * (wrong > 0)) / (n - j)
    return 1.0 - missed
