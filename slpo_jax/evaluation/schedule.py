"""How the rollouts of a problem set are sharded over batches: few shapes to compile, and little padding."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from slpo_jax.data.batches import EncodedProblems, end_to_end, pad_prompts
from slpo_jax.policy.prompted import Prompts


@dataclasses.dataclass
class RolloutBatch:
    """Rollouts of one call: prompts of B rows, and for N rollouts, N/B of each prompt in a row, which they are.

    Attributes:
        index_N, sample_N: int32, problem and number of the sample.
        real_N: bool, False for what fills the batch up.
    """

    prompts: Prompts
    index_N: np.ndarray
    sample_N: np.ndarray
    real_N: np.ndarray


def rollout_batches(
    problems: EncodedProblems, count: int, samples: int, batch_size: int, devices: int, slots: Sequence[int]
) -> Iterator[RolloutBatch]:
    """The rollouts of the first `count` problems, `samples` of each.

    Problems whose prompts fit the same bucket make up a class; a class is sharded so that every device has about as
    many tokens in every batch, and prompts that are padded a lot are encoded end to end.

    Args:
        batch_size: rollouts at a time, over all devices.
        slots: buckets of prompts, ascending.
    Raises:
        UserError: a prompt is longer than the largest bucket.
    """
    lengths = np.array([len(prompt) for prompt in problems.prompts[:count]])
    rows, each = batch_shape(count, samples, batch_size, devices)
    # A problem's samples may be several items, of `each` rollouts.
    index_I = np.repeat(np.argsort(lengths, kind="stable"), samples // each)
    offset_I = np.tile(np.arange(0, samples, each), count)
    for items in classes(lengths[index_I], slots, rows * devices):
        longest = lengths[index_I[items[-1]]]
        width = min((size for size in slots if size >= longest), default=max(slots))
        shards, real_SR = shard(items, rows, devices)
        index_SR = index_I[shards]
        kept_SR = np.where(real_SR, lengths[index_SR], 1)  # of what fills a batch up, one token
        capacity = end_to_end(int(kept_SR.sum(axis=1).max()), rows, width)
        for first in range(0, len(shards), devices):
            batch = slice(first, first + devices)
            index_B, kept_B, real_B = (x[batch].reshape(-1) for x in (index_SR, kept_SR, real_SR))
            prompts = [problems.prompts[i][-kept:] for i, kept in zip(index_B, kept_B, strict=True)]
            tokens, valid = pad_prompts(prompts, (width,), index_B, problems.template.pad_id)
            sample_BE = offset_I[shards[batch]].reshape(-1, 1) + np.arange(each)
            yield RolloutBatch(
                Prompts(tokens, valid, capacity),
                np.repeat(index_B, each).astype(np.int32),
                sample_BE.reshape(-1).astype(np.int32),
                np.repeat(real_B, each),
            )


def batch_shape(count: int, samples: int, batch_size: int, devices: int) -> tuple[int, int]:
    """(prompts on a device, rollouts of each) of a batch.

    Batches are halved while a quarter would do, so that few problems cost little and few shapes compile.
    """
    each = max(n for n in range(1, samples + 1) if samples % n == 0 and (n == 1 or n * devices <= batch_size))
    rows = max(batch_size // (each * devices), 1)
    while rows > 1 and rows * devices >= 4 * count * (samples // each):
        rows //= 2
    return rows, each


def classes(lengths_I: np.ndarray, slots: Sequence[int], together: int) -> list[np.ndarray]:
    """Items whose prompts fit the same bucket, as many as make whole batches; the others go with the next bucket's.

    Args:
        lengths_I: ascending.
        slots: ascending.
        together: items of a batch.
    Returns:
        int arrays, the indices of each class's items; only the last may have a part of a batch.
    """
    ends = np.searchsorted(lengths_I, slots, side="right")
    # What is left over in the longest prompts' own bucket stays with them.
    cuts = [end // together * together for end in ends if end < len(lengths_I)]
    return [part for part in np.split(np.arange(len(lengths_I)), cuts) if len(part)]


def shard(items: np.ndarray, rows: int, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Items of ascending length in shards of `rows`, as many as whole batches take, of about equal lengths.

    Returns:
        int [shards, rows], and bool, whether it is not there only to fill up.
    """
    count = -(-len(items) // (rows * devices)) * devices
    shard_S, row_R = np.arange(count)[:, None], np.arange(rows)
    # To and fro: who gets the longest of one round gets the shortest of the next.
    items_SR = count * row_R + np.where(row_R % 2, count - 1 - shard_S, shard_S)
    return items[np.minimum(items_SR, len(items) - 1)], items_SR < len(items)
