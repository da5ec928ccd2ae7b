"""An evaluation that is interrupted goes on with the batches that are left, and ends as one that was not."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny import END, PAD, ROLLOUT, policy_of

from slpo_jax.evaluation.evaluate import Evaluator
from slpo_jax.evaluation.rollout_cache import Batch, RolloutCache
from slpo_jax.io.mesh import device_mesh

pytestmark = pytest.mark.usefixtures("cpu_devices")
LENGTHS, SAMPLES, BATCH = (7, 2, 9, 4, 3, 8, 2), 3, 6
BY_THRESHOLD = dataclasses.replace(ROLLOUT, stopping="threshold")


class Problems(SimpleNamespace):
    def __len__(self):
        return len(self.prompts)


PROBLEMS = Problems(
    prompts=[np.arange(length).tolist() for length in LENGTHS], template=SimpleNamespace(pad_id=PAD, closing_ids=(END,))
)


class Crash(Exception):
    """Stands for a kill."""


class Rollouts:
    """Stands for the compiled program: says which problem and sample a row is of, and dies at its nth call."""

    def __init__(self, dies_at: int = 0):
        self.calls, self.dies_at = 0, dies_at

    def evaluate(self, cache, latents=False, **changes):
        evaluator = Evaluator(
            policy_of(BY_THRESHOLD), device_mesh(jax.devices("cpu")[:2]), BATCH, (3, 6, 9), jax.random.key(2)
        )
        evaluator.program = lambda *_: self._program(latents)
        arguments = {"samples": SAMPLES, "seed": 1, "keep_latents": latents, "cache": cache} | changes
        return evaluator.run({}, PROBLEMS, "threshold", 0.5, **arguments)

    def _program(self, latents):
        def program(params, prompts, index_N, sample_N, real_N, key, rule_N):
            self.calls += 1
            if self.calls == self.dies_at:
                raise Crash
            index, sample = np.asarray(index_N), np.asarray(sample_N)
            tokens = np.stack([index, sample], axis=1).astype(np.int32)
            drawn = {"latents": (index[:, None, None] + 0.1 * np.ones((1, 4, 2))).astype(np.float32)} if latents else {}
            return {"tokens": tokens, "latent_steps": (10 * index + sample).astype(np.int32), **drawn}

        return program


def _assert_right(done, latents=False):
    rows = [(index, sample) for index in range(len(LENGTHS)) for sample in range(SAMPLES)]
    assert done.tokens.tolist() == [list(row) for row in rows]
    assert done.latent_steps.tolist() == [10 * index + sample for index, sample in rows]
    assert ("latents" in done.values) == latents
    if latents:
        np.testing.assert_array_equal(done.values["latents"][:, 0, 0], [np.float32(index + 0.1) for index, _ in rows])


@pytest.mark.parametrize("latents", [False, True])
@pytest.mark.parametrize("dies_at", [1, 2, 3, 4])
def test_no_batch_is_rolled_out_twice(tmp_path, latents, dies_at):
    whole = Rollouts()
    _assert_right(whole.evaluate(None, latents), latents)
    assert whole.calls >= 4
    cache, cut, again = RolloutCache(tmp_path / "set.partial", "a" * 64, "seed 1"), Rollouts(dies_at), Rollouts()
    with pytest.raises(Crash):
        cut.evaluate(cache, latents)
    _assert_right(again.evaluate(cache, latents), latents)
    # The batch that was under way when the next one died is lost too.
    assert cut.calls + again.calls == whole.calls + min(dies_at, 2)
    third = Rollouts()
    _assert_right(third.evaluate(cache, latents), latents)
    assert third.calls == 0
    cache.clear()
    assert not cache.folder.exists()


def test_other_evaluations_batches_are_not_taken(tmp_path):
    folder = tmp_path / "set.partial"
    Rollouts().evaluate(RolloutCache(folder, "a" * 64, "seed 1"))
    for evaluation, name in (("b" * 64, "seed 1"), ("a" * 64, "seed 2"), ("a" * 64, "seed 11")):
        other = Rollouts()
        _assert_right(other.evaluate(RolloutCache(folder, evaluation, name)))
        assert other.calls >= 4


def test_other_batches_of_the_same_evaluation_are_used_where_they_are_whole(tmp_path):
    """As after a change of the batch size or of the number of devices."""
    cache = RolloutCache(tmp_path, "a" * 64, "seed 1")
    rows = np.arange(4 * SAMPLES)
    tokens, steps = np.stack([rows // SAMPLES, rows % SAMPLES], axis=1), 10 * (rows // SAMPLES) + rows % SAMPLES
    cache.add(0, Batch(rows, {"tokens": tokens, "latent_steps": steps}))
    again = Rollouts()
    _assert_right(again.evaluate(cache))
    assert again.calls > 0


def test_a_torn_file_is_rolled_out_again(tmp_path):
    cache = RolloutCache(tmp_path, "a" * 64, "seed 1")
    Rollouts().evaluate(cache)
    path = next(tmp_path.glob("*.1.npz"))
    path.write_bytes(path.read_bytes()[:200])
    again = Rollouts()
    _assert_right(again.evaluate(cache))
    assert again.calls == 1
