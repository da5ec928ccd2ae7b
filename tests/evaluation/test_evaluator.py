"""Evaluation's batches: every rollout once, little padding, and results that depend on neither."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from slpo_jax.errors import UserError
from slpo_jax.evaluation import evaluator
from slpo_jax.evaluation.completions import scale_scores
from slpo_jax.evaluation.evaluator import Evaluator, classes, shard
from slpo_jax.evaluation.records import RolloutCache
from slpo_jax.policy import noise
from slpo_jax.policy.scorers import SCORERS, Scorer, score_rollouts
from slpo_jax.runtime.mesh import device_mesh
from tiny import (
    END,
    EOS,
    PAD,
    ROLLOUT,
    SlowReasoner,
    both_params,
    pad_left,
    policy_of,
    run_rollout,
)

LENGTHS = (7, 2, 9, 4, 3, 8, 2)
pytestmark = pytest.mark.usefixtures("cpu_devices")

BY_THRESHOLD = dataclasses.replace(ROLLOUT, stopping="threshold")


class Problems(SimpleNamespace):
    def __len__(self):
        return len(self.prompts)


@pytest.fixture(scope="module")
def problems():
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, END, size=length).tolist() for length in LENGTHS]
    return Problems(prompts=prompts, template=SimpleNamespace(pad_id=PAD))


def make_evaluator(
    batch_size: int, slots=(3, 6, 9), devices: int = 1, config=BY_THRESHOLD
) -> Evaluator:
    mesh = device_mesh(jax.devices("cpu")[:devices])
    return Evaluator(policy_of(config), mesh, batch_size, slots, jax.random.key(2))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("batch_size", "samples"),
    [
        (1, 1),
        (4, 1),
        (64, 1),
        (4, 6),
        (12, 6),
        (5, 6),
        (64, 6),
        (2, 7),
    ],
)
def test_every_rollout_is_in_one_batch(problems, batch_size, samples, devices):
    seen = []
    for batch in make_evaluator(batch_size, devices=devices).batches(
        problems, len(LENGTHS), samples
    ):
        rows = len(batch.prompts.tokens)
        rollouts = len(batch.index_N)
        assert rows % devices == rollouts % rows == 0
        assert rollouts <= max(batch_size, devices) + devices - 1
        index_BR, real_BR = (x.reshape(rows, -1) for x in (batch.index_N, batch.real_N))
        assert (index_BR == index_BR[:, :1]).all()
        assert (real_BR == real_BR[:, :1]).all()
        for row, (index, real) in enumerate(
            zip(index_BR[:, 0], real_BR[:, 0], strict=True)
        ):
            whole = problems.prompts[index]
            assert batch.prompts.tokens[row][batch.prompts.valid[row]].tolist() == (
                whole if real else whole[-1:]
            )
        on_a_device = batch.prompts.lengths.reshape(devices, -1).sum(axis=1)
        slots = batch.prompts.packed_slots
        assert not slots or max(on_a_device) <= slots < batch.prompts.tokens.size
        seen += zip(
            batch.index_N[batch.real_N].tolist(),
            batch.sample_N[batch.real_N].tolist(),
            strict=True,
        )
    assert sorted(seen) == [
        (index, sample) for index in range(len(LENGTHS)) for sample in range(samples)
    ]


def test_classes_are_whole_batches_of_a_bucket():
    lengths = np.array(
        [
            1,
            2,
            3,
            3,
            4,
            5,
            6,
            7,
            8,
            8,
        ]
    )
    assert [lengths[part].tolist() for part in classes(lengths, (3, 6, 9), 1)] == [
        [1, 2, 3, 3],
        [4, 5, 6],
        [7, 8, 8],
    ]
    assert [lengths[part].tolist() for part in classes(lengths, (3, 6, 9), 3)] == [
        [1, 2, 3],
        [3, 4, 5],
        [6, 7, 8, 8],
    ]
    assert [lengths[part].tolist() for part in classes(lengths, (3, 6, 9), 8)] == [
        lengths.tolist()
    ]
    assert [lengths[part].tolist() for part in classes(lengths[:5], (3, 6, 9), 2)] == [
        [1, 2, 3, 3],
        [4],
    ]
    assert [lengths[part].tolist() for part in classes(lengths[:7], (3, 6, 9), 2)] == [
        [1, 2, 3, 3],
        [4, 5, 6],
    ]


@pytest.mark.parametrize("devices", [1, 2])
def test_shards_are_about_equal(devices):
    lengths = np.sort(np.random.default_rng(0).integers(10, 100, size=61))
    shards, real = shard(np.arange(61), 4, devices)
    assert shards.shape == (16, 4)
    assert sorted(shards[real].tolist()) == list(range(61))
    sums = lengths[shards][real.all(axis=1)].sum(axis=1)
    assert sums.max() - sums.min() < 0.2 * sums.mean()


def test_the_noise_of_a_set_is_its_own(problems):
    """Drawn by seed, name, place and sample: never the same on two sets, always the same on one, in any process."""

    def program(params, prompts, index_N, sample_N, real_N, key, rule_N):
        drawn_N = jax.vmap(jax.random.bits)(
            noise.row_keys(key, index_N, sample_N)
        ).view(jnp.int32)
        return {
            "tokens": drawn_N[:, None],
            "latent_steps": jnp.zeros(len(index_N), jnp.int32),
        }

    made = make_evaluator(64)
    made.program = lambda *_: program

    def draws(name, seed=0):
        return made.run(
            {}, problems, "threshold", 0.5, seed=seed, samples=3, name=name
        )["tokens"][:, 0].tolist()

    found = [
        draws("gsm8k"),
        draws("gsm_hard"),
        draws("gsm8k", seed=1),
        draws(""),
    ]
    assert len({number for numbers in found for number in numbers}) == 4 * 3 * len(
        LENGTHS
    )
    assert draws("gsm8k") == found[0]
    # CRC-32's published check value is that of this text.
    key = jax.random.fold_in(
        noise.stream_key(jax.random.key(2), "evaluate", 0), 0xCBF43926
    )
    keys = noise.row_keys(
        key,
        jnp.repeat(jnp.arange(len(LENGTHS)), 3),
        jnp.tile(jnp.arange(3), len(LENGTHS)),
    )
    assert (
        draws("123456789") == jax.vmap(jax.random.bits)(keys).view(jnp.int32).tolist()
    )


def test_time_is_of_a_warm_batch(problems, monkeypatch):
    """The first pass, which compiles, is left out, and the fastest of the others is divided by the real answers."""
    seconds = iter([0.0, 9.0, 10.0, 10.5, 11.0, 11.25, 12.0, 13.0])
    monkeypatch.setattr(
        evaluator, "time", SimpleNamespace(perf_counter=lambda: next(seconds))
    )
    asked = []
    made = make_evaluator(64)
    made.program = lambda *settings: (
        lambda params, prompts, index_N, *_: asked.append(index_N) or index_N
    )
    milliseconds, answers = made.milliseconds({}, problems, "threshold", 0.5)
    assert answers == len(LENGTHS)
    assert milliseconds == pytest.approx(250 / len(LENGTHS))
    assert len(asked) == 4


def test_few_problems_take_a_small_batch(problems):
    (batch,) = make_evaluator(64).batches(problems, 2, 3)
    assert len(batch.index_N) <= 4 * 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize("where", ["thought", "latents"])
def test_results_are_those_of_each_rollout_alone(problems, where):
    """In the problems' order, under dropout, prompts end to end, encoded once for all samples (no noise) or not."""
    config = dataclasses.replace(BY_THRESHOLD, dropout_where=where)
    samples = 3
    params = both_params()
    made = make_evaluator(12, slots=(12,), config=config)
    assert all(
        batch.prompts.packed_slots
        for batch in made.batches(problems, len(LENGTHS), samples)
    )
    done = made.run(
        params, problems, "threshold", 0.5, seed=1, samples=samples, keep_latents=True
    )
    assert len(set(done["latent_steps"].tolist())) > 1
    key = noise.stream_key(jax.random.key(2), "evaluate", 1)
    for place in range(0, len(LENGTHS) * samples, 4):
        index, sample = divmod(place, samples)
        keys = noise.row_keys(key, jnp.array([index]), jnp.array([sample]))
        alone = run_rollout(
            params,
            pad_left([problems.prompts[index]], 9),
            keys,
            config=config,
            stop_rule=0.5,
        )
        assert done["tokens"][place].tolist() == alone.tokens[0].tolist()
        assert done["latent_steps"][place] == alone.lengths[0]
        np.testing.assert_allclose(done["latents"][place], alone.actions[0], atol=1e-5)


@pytest.mark.slow
def test_samples_are_scored_by_their_own_thoughts_and_answers(problems):
    """Means over the tokens up to the end, and the gate's distribution of the stop, in a slow loop."""
    config = dataclasses.replace(BY_THRESHOLD, dropout_rate=0.0, temperature=1.0)
    mesh = device_mesh(jax.devices("cpu")[:1])
    params = both_params()
    scored = Evaluator(
        policy_of(config),
        mesh,
        8,
        (3, 6, 9),
        jax.random.key(2),
        ("likelihood", "self_certainty", "gate"),
    )
    done = scored.run(
        params,
        problems,
        "threshold",
        0.6,
        seed=0,
        samples=2,
        limit=3,
    )
    slow = SlowReasoner(params["reasoner"])
    found = done["likelihood"]
    for row, tokens in enumerate(done["tokens"].tolist()):
        prompt = problems.prompts[row // 2]
        used = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
        tau = int(done["latent_steps"][row])
        latents = slow.think(prompt, tau)
        inputs = np.concatenate(
            [
                slow.embed(prompt),
                latents,
                slow.embed([END, *tokens[: used - 1]]),
            ]
        )
        log_probs = special.log_softmax(
            slow.logits(slow.hidden(inputs)[-used:]), axis=-1
        )
        mean = np.mean([log_probs[at, token] for at, token in enumerate(tokens[:used])])
        assert found[row] == pytest.approx(np.exp(mean), rel=1e-4)
        uniform = np.mean(
            [-log_probs[at].mean() - np.log(log_probs.shape[1]) for at in range(used)]
        )
        assert done["self_certainty"][row] == pytest.approx(uniform, rel=1e-4)
        rho = special.expit(latents @ np.asarray(params["gate"]["out"]["kernel"])[:, 0])
        stop = np.log1p(-rho[:-1]).sum() + (
            np.log(rho[-1]) if tau < ROLLOUT.max_latents else 0.0
        )
        assert done["gate"][row] == pytest.approx(stop, rel=1e-4)
    assert len(np.unique(done["tokens"], axis=0)) > 3
    assert (
        len({ROLLOUT.max_latents, *done["latent_steps"]})
        == len({*done["latent_steps"]})
        > 1
    ), "some have to stop"
    assert "likelihood" not in scored.run(params, problems, "threshold", 0.6, limit=3)


def test_scores_that_are_logarithms_are_shares_of_a_problem_s_largest(monkeypatch):
    """So large ones neither overflow nor tie, and votes have the weights of a softmax."""
    monkeypatch.setitem(SCORERS, "mine", Scorer(None, log=True))
    logs = np.array([900.0, 901.0, -3.0, -1.0], np.float32)
    found = scale_scores({"mine": logs, "tokens": logs}, samples=2)
    np.testing.assert_allclose(
        found["mine"],
        np.exp(
            [
                -1,
                0,
                -2,
                0,
            ]
        ),
    )
    np.testing.assert_array_equal(found["tokens"], logs)


@pytest.mark.parametrize("score", [np.nan, -1.0, np.inf])
def test_a_score_that_is_no_number_of_0_or_more_is_one_line(monkeypatch, score):
    monkeypatch.setitem(SCORERS, "mine", Scorer(None))
    with pytest.raises(UserError, match=r"^config\.evaluate\.scorers: mine "):
        scale_scores({"mine": np.array([1.0, score])}, samples=2)


@pytest.mark.parametrize(
    ("scorer", "fault"),
    [
        (lambda *_: 1 / 0, "mine: ZeroDivisionError: division by zero; mend it"),
        (lambda: 1, "mine: TypeError: .*; mend it"),
        (
            lambda policy, params, prompts, out: jnp.ones((2, 1)),
            r"mine: TypeError: .*\(2, 1\).*\(7,\).*a number of each",
        ),
    ],
)
def test_a_scorer_that_fails_is_one_line(monkeypatch, scorer, fault):
    monkeypatch.setitem(SCORERS, "mine", Scorer(scorer))
    with pytest.raises(UserError, match=rf"^config\.evaluate\.scorers: {fault}"):
        score_rollouts("mine", None, {}, None, SimpleNamespace(lengths=jnp.zeros(7)))


STUBS = Problems(
    prompts=[np.arange(length).tolist() for length in LENGTHS],
    template=SimpleNamespace(pad_id=PAD, closing_ids=(END,)),
)
SAMPLES = 3


class Crash(Exception):
    """Stands for a kill."""


class Rollouts:
    """Stands for the compiled program: says which problem and sample a row is of, and dies at its nth call."""

    def __init__(self, dies_at: int = 0):
        self.calls = 0
        self.dies_at = dies_at

    def evaluate(self, cache, latents=False, **changes):
        made = make_evaluator(6, devices=2)
        made.program = lambda *_: self._program(latents)
        arguments = {
            "samples": SAMPLES,
            "seed": 1,
            "keep_latents": latents,
            "cache": cache,
        } | changes
        return made.run({}, STUBS, "threshold", 0.5, **arguments)

    def _program(self, latents):
        def program(params, prompts, index_N, sample_N, real_N, key, rule_N):
            self.calls += 1
            if self.calls == self.dies_at:
                raise Crash
            index = np.asarray(index_N)
            sample = np.asarray(sample_N)
            tokens = np.stack([index, sample], axis=1).astype(np.int32)
            drawn = (
                {
                    "latents": (index[:, None, None] + 0.1 * np.ones((1, 4, 2))).astype(
                        np.float32
                    )
                }
                if latents
                else {}
            )
            return {
                "tokens": tokens,
                "latent_steps": (10 * index + sample).astype(np.int32),
                **drawn,
            }

        return program


def _assert_right(done, latents=False):
    rows = [
        (index, sample) for index in range(len(LENGTHS)) for sample in range(SAMPLES)
    ]
    assert done["tokens"].tolist() == [list(row) for row in rows]
    assert done["latent_steps"].tolist() == [
        10 * index + sample for index, sample in rows
    ]
    assert ("latents" in done) == latents
    if latents:
        np.testing.assert_array_equal(
            done["latents"][:, 0, 0], [np.float32(index + 0.1) for index, _ in rows]
        )


@pytest.mark.parametrize(
    ("latents", "dies_at"),
    [
        (False, 1),
        (False, 2),
        (True, 3),
        (False, 4),
    ],
)
def test_no_batch_is_rolled_out_twice(tmp_path, latents, dies_at):
    whole = Rollouts()
    _assert_right(whole.evaluate(None, latents), latents)
    assert whole.calls >= 4
    cache = RolloutCache(tmp_path / "set.partial", "a" * 64, "seed 1")
    cut = Rollouts(dies_at)
    again = Rollouts()
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
    for evaluation, name in (
        ("b" * 64, "seed 1"),
        ("a" * 64, "seed 2"),
        ("a" * 64, "seed 11"),
    ):
        other = Rollouts()
        _assert_right(other.evaluate(RolloutCache(folder, evaluation, name)))
        assert other.calls >= 4


def test_other_batches_of_the_same_evaluation_are_used_where_they_are_whole(tmp_path):
    """As after a change of the batch size or of the number of devices."""
    cache = RolloutCache(tmp_path, "a" * 64, "seed 1")
    rows = np.arange(4 * SAMPLES)
    tokens = np.stack([rows // SAMPLES, rows % SAMPLES], axis=1)
    steps = 10 * (rows // SAMPLES) + rows % SAMPLES
    cache.add(0, {"rows": rows, "tokens": tokens, "latent_steps": steps})
    again = Rollouts()
    _assert_right(again.evaluate(cache))
    assert again.calls > 0


def test_a_batch_or_a_folder_that_can_not_be_read_is_said(tmp_path, unreadable):
    cache = RolloutCache(tmp_path, "a" * 64, "seed 1")
    Rollouts().evaluate(cache)
    for path in (tmp_path, next(tmp_path.glob("*.1.npz"))):
        with unreadable(path), pytest.raises(PermissionError, match=path.name):
            Rollouts().evaluate(cache)


def test_batches_that_the_first_process_alone_sees_are_one_line(
    tmp_path, second_process
):
    cache = RolloutCache(tmp_path / "real.partial", "a" * 64, "seed 1")
    with (
        second_process(),
        pytest.raises(UserError, match=rf"^{cache.folder}: process 1 "),
    ):
        Rollouts().evaluate(cache)
    Rollouts().evaluate(cache)
    with second_process():
        _assert_right(Rollouts().evaluate(cache))


def test_a_torn_file_is_rolled_out_again(tmp_path):
    cache = RolloutCache(tmp_path, "a" * 64, "seed 1")
    Rollouts().evaluate(cache)
    path = next(tmp_path.glob("*.1.npz"))
    path.write_bytes(path.read_bytes()[:200])
    again = Rollouts()
    _assert_right(again.evaluate(cache))
    assert again.calls == 1
