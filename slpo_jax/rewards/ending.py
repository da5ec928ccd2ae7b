"""Where an answer ends: with an end token, or with the token after which its text holds a stop string."""

import dataclasses
import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

NO_STOP = np.iinfo(np.int16).max  # in `StopStrings.begins_SC`


@dataclasses.dataclass(frozen=True, eq=False)
class StopStrings:
    """An automaton over tokens that finds the first of several texts; `stopping` makes it.

    A state is the longest end of the text so far that begins a stop string; the text begins in state 0. C classes of
    tokens, which no state tells apart. Equal to itself alone, so that a program's static arguments may hold it.

    Attributes:
        classes_V: int, the tokens' classes.
        after_SC: int16, the next state.
        begins_SC: int16, where the first stop string begins that the token completes, in bytes from the token's first
            one (less than 0: in a token before); `NO_STOP` where it completes none.
        bytes_V: int32, the tokens' lengths in bytes.
        cuts: int32, ascending: token * `width` + bytes kept, for every place inside a token where a stop string may
            begin. The i-th is written as id V + i.
        width: more than any token's bytes.
    """

    classes_V: np.ndarray
    after_SC: np.ndarray
    begins_SC: np.ndarray
    bytes_V: np.ndarray
    cuts: np.ndarray
    width: int

    def step(self, states_N: jax.Array, tokens_N: jax.Array) -> tuple[jax.Array, jax.Array]:
        """int32 [N], int [N]: the states after these tokens, and where stop strings begin (`begins_SC`)."""
        classes_N = jnp.asarray(self.classes_V)[tokens_N]
        states, begins = jnp.asarray(self.after_SC)[states_N, classes_N], jnp.asarray(self.begins_SC)
        return states.astype(jnp.int32), begins[states_N, classes_N].astype(jnp.int32)

    def begins(self, tokens_NA: jax.Array) -> jax.Array:
        """int32 [N, A]: `begins_SC` of each token after those before it."""
        # Made from the data, so that it varies over a mesh as the data do: shard_map insists on that in a scan.
        zeros_N = 0 * tokens_NA[:, 0]
        return jax.lax.scan(self.step, zeros_N.astype(jnp.int32), tokens_NA.T)[1].T


def is_end(tokens: jax.Array, eos_ids: Sequence[int]) -> jax.Array:
    """bool, the tokens' shape: which are end tokens."""
    return functools.reduce(operator.or_, (tokens == eos_id for eos_id in eos_ids))


def said_eos(said_NT: jax.Array, lengths_N: jax.Array, eos_ids: Sequence[int]) -> jax.Array:
    """bool [N]: whether a thought's last step is written down as eos, so that no answer follows."""
    last_NT = jnp.arange(1, said_NT.shape[1] + 1)[None] == lengths_N[:, None]
    return jnp.any(last_NT & is_end(said_NT, eos_ids), axis=1)


def ends(tokens_NA: jax.Array, eos_ids: Sequence[int], stops: StopStrings | None = None) -> jax.Array:
    """bool [N, A]: the tokens that end an answer."""
    ends_NA = is_end(tokens_NA, eos_ids)
    return ends_NA if stops is None else ends_NA | (stops.begins(tokens_NA) != NO_STOP)


def answer_mask(tokens_NA: jax.Array, eos_ids: Sequence[int], stops: StopStrings | None = None) -> jax.Array:
    """bool [N, A]: the generated tokens, up to and including the one that ended the answer."""
    ends_NA = ends(tokens_NA, eos_ids, stops)
    return jnp.cumsum(ends_NA, axis=1) - ends_NA == 0


def text_tokens(tokens_NA: jax.Array, eos_ids: Sequence[int], stops: StopStrings | None = None) -> jax.Array:
    """The tokens of each answer's text, ended by the first of `eos_ids`: what verifiers of texts read.

    A stop string and what comes after it is no part of the text. Where one begins inside a token, that token becomes
    the id of the bytes before it (`StopStrings.cuts`).

    Returns:
        int [N, A], or [N, A + 1] with stop strings. Answers without an end have no end token here either.
    """
    is_eos_NA = is_end(tokens_NA, eos_ids)
    read_NA = tokens_NA if len(eos_ids) == 1 else jnp.where(is_eos_NA, eos_ids[0], tokens_NA)
    if stops is None:
        return read_NA
    begins_NA, lengths_NA = stops.begins(tokens_NA), jnp.asarray(stops.bytes_V)[tokens_NA]
    before_NA = jnp.cumsum(lengths_NA, axis=1) - lengths_NA

    def at(x_NA, slot_N):
        return jnp.take_along_axis(x_NA, slot_N[:, None], axis=1)

    stopped_NA = begins_NA != NO_STOP
    ended_N = jnp.argmax(is_eos_NA | stopped_NA, axis=1)
    by_stop_N1 = at(stopped_NA & ~is_eos_NA, ended_N)
    begin_N1 = at(before_NA + begins_NA, ended_N)
    holding_N = jnp.argmax((before_NA <= begin_N1) & (begin_N1 < before_NA + lengths_NA), axis=1)
    kept_N1 = begin_N1 - at(before_NA, holding_N)
    cut_N1 = jnp.searchsorted(jnp.asarray(stops.cuts), at(tokens_NA, holding_N) * stops.width + kept_N1)
    cut_N1 = jnp.where(kept_N1 > 0, stops.bytes_V.size + cut_N1, eos_ids[0]).astype(tokens_NA.dtype)
    read_NA = jnp.pad(read_NA, ((0, 0), (0, 1)), constant_values=-1)  # of no token, and no end: padding may be one
    slots, holding_N1 = jnp.arange(read_NA.shape[1])[None], holding_N[:, None]
    stopped_NA = jnp.where(slots < holding_N1, read_NA, jnp.where(slots == holding_N1, cut_N1, eos_ids[0]))
    return jnp.where(by_stop_N1, stopped_NA, read_NA)
