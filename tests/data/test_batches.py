"""Input order and padding, against sets worked out by hand."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slpo_jax.architectures.coconut import Coconut
from slpo_jax.data.batches import (
    batch_indices,
    draw_numbers,
    encode_problems,
    end_to_end,
    pad_prompts,
    pad_suffixes,
    padded_chunks,
)
from slpo_jax.data.problem import Problem
from slpo_jax.data.tokenizer import task_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.policy.rollout import Trajectories
from slpo_jax.training import rollouts
from slpo_jax.training.rollouts import make_batch
from small_steps import POLICY

PROBLEMS = (
    Problem("Tom has 5 apples .", ("5 + 3 = 8", "8 x 2 = 16"), "16"),
    Problem("Mia has 7 .", (), "7"),
    Problem("Tom has 5 apples . He buys 3 .", ("5 + 3 = 8",), "8"),
)


def _encoded(problems):
    return encode_problems(
        Coconut().template(task_tokenizer("synthetic", 30)), problems
    )


@given(st.integers(0, 5), st.integers(1, 13), st.integers(1, 30))
def test_every_epoch_is_a_shuffle_without_replacement(seed, n, batch_size):
    steps = -(-3 * n // batch_size)
    stream = np.concatenate(
        [batch_indices(seed, step, n, batch_size) for step in range(steps)]
    )
    for epoch in range(3):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_order_is_a_pure_function_that_doesnt_depend_on_the_batch_size():
    whole = batch_indices(7, 0, 10, 40)
    assert whole.dtype == np.int64
    for step in (3, 0, 2, 3):  # in any order, again and again
        np.testing.assert_array_equal(
            batch_indices(7, step, 10, 8), whole[8 * step : 8 * step + 8]
        )
    before = whole.copy()
    whole[:] = -1  # a caller's change must not reach the next one
    np.testing.assert_array_equal(batch_indices(7, 0, 10, 40), before)


def test_epochs_and_seeds_differ():
    first = batch_indices(0, 0, 50, 50)
    second = batch_indices(0, 1, 50, 50)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, batch_indices(1, 0, 50, 50))
    assert not np.array_equal(first, np.arange(50))


def test_prompts_are_padded_on_the_left_to_the_smallest_bucket():
    tokens, valid = pad_prompts(
        [[5, 6, 7], [8], [1, 2, 3, 4]], slots=(8, 5, 2), pad_id=9
    )
    np.testing.assert_array_equal(
        tokens, [[9, 9, 5, 6, 7], [9, 9, 9, 9, 8], [9, 1, 2, 3, 4]]
    )
    np.testing.assert_array_equal(
        valid, [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [0, 1, 1, 1, 1]]
    )
    assert (tokens.dtype, valid.dtype) == (np.int32, np.bool_)


@pytest.mark.parametrize(("length", "bucket"), [(1, 4), (4, 4), (5, 6), (6, 6)])
def test_bucket_borders(length, bucket):
    assert pad_prompts([[1] * length], slots=(4, 6))[0].shape == (1, bucket)


def test_suffixes_are_shifted_and_padded_on_the_right():
    batch = pad_suffixes([[50, 1, 2, 3, 60], [50, 4, 60]], slots=4, pad_id=9)
    np.testing.assert_array_equal(batch.tokens, [[50, 1, 2, 3], [50, 4, 9, 9]])
    np.testing.assert_array_equal(batch.targets, [[1, 2, 3, 60], [4, 60, 9, 9]])
    np.testing.assert_array_equal(batch.weights, [[1, 1, 1, 1], [1, 1, 0, 0]])
    assert (batch.tokens.dtype, batch.targets.dtype, batch.weights.dtype) == (
        np.int32,
        np.int32,
        np.float32,
    )


def test_a_suffix_that_doesnt_fit_is_named():
    with pytest.raises(UserError, match=r"^config\.max_answer_tokens: row 1 "):
        pad_suffixes([[50, 1, 2, 60], [50, 1, 2, 3, 60]], slots=3)


@given(st.integers(1, 40), st.integers(1, 50))
def test_chunks_hold_every_example_once(n, batch_size):
    chunks = list(padded_chunks(n, batch_size))
    assert np.concatenate([indices[real] for indices, real in chunks]).tolist() == list(
        range(n)
    )
    assert all(
        len(indices) == len(real) == batch_size and indices.max() < n
        for indices, real in chunks
    )


def test_encoded_problems_equal_the_template_one_by_one():
    encoded = _encoded(PROBLEMS)
    template = encoded.template
    assert len(encoded) == 3
    assert encoded.problems == PROBLEMS
    for index, problem in enumerate(PROBLEMS):
        assert encoded.prompts[index] == template.prompt(problem.question)
        for first_step in range(4):
            assert encoded.suffix(index, first_step) == template.suffix(
                problem.steps[first_step:], problem.answer
            )
            assert encoded.suffix_size(index, first_step) == len(
                encoded.suffix(index, first_step)
            )
        assert encoded.suffix(index, None) == template.suffix([], problem.answer)
        assert encoded.suffix_size(index, None) == len(encoded.suffix(index, None))


def test_prompt_batch_of_encoded_problems():
    encoded = _encoded(PROBLEMS)
    template = encoded.template
    tokens, valid = encoded.prompt_batch(np.array([1, 0]), slots=(7, 16))
    # "Mia has 7 ." and "Tom has 5 apples ." with line break and start marker: 6 and 7 tokens.
    np.testing.assert_array_equal(
        tokens[0], [template.pad_id, *template.prompt(PROBLEMS[1].question)]
    )
    np.testing.assert_array_equal(tokens[1], template.prompt(PROBLEMS[0].question))
    np.testing.assert_array_equal(valid.sum(1), [6, 7])


@pytest.mark.parametrize(
    ("most", "slots", "capacity"),
    [
        (10, 8, 12),  # in multiples of 4 * 3
        (12, 8, 12),
        (13, 8, 0),  # 24 of 24
        (13, 10, 24),
        (13, 9, 0),  # 24 of 27 saves too little
    ],
)
def test_capacity_of_three_prompts_end_to_end(most, slots, capacity):
    assert end_to_end(most, 3, slots) == capacity


@pytest.mark.parametrize("parts", [1, 4])
def test_prompts_of_a_run_are_end_to_end_in_as_many_slots_as_its_steps_need(parts):
    """Long and short ones: in 24 slots, that is much padding."""
    long = "Tom has 5 apples ."
    short = "5 ."
    problems = _encoded([Problem(long, (), "5"), Problem(short, (), "5")] * 20)
    most = problems.most_tokens(3, 60, 8, parts)
    batches = [
        make_batch(problems, step, 3, 8, (24,), None, most, parts).prompts
        for step in range(60)
    ]
    assert (
        max(batch.lengths.reshape(parts, -1).sum(axis=1).max() for batch in batches)
        == most
    )
    assert (
        {batch.packed_slots for batch in batches}
        == {end_to_end(most, 8 // parts, 24)}
        != {0}
    )
    assert problems.most_tokens(3, 0, 8, parts) == 0  # a stage may have no steps
    longest = max(len(prompt) for prompt in problems.prompts)
    # There is nothing to gain.
    assert (
        make_batch(
            problems, 0, 3, 8, (longest,), None, most, parts
        ).prompts.packed_slots
        == 0
    )
    assert make_batch(problems, 0, 3, 8, (24,), None).prompts.packed_slots == 0


@pytest.mark.parametrize(
    ("long", "most", "parts", "capacity"),
    [
        ((), 8, 3, 8),  # room for the very last token
        *[(at, 14, 3, 16) for at in ((0, 1), (2, 3), (4, 5))],
        *[
            (
                at,
                8,
                3,
                "8 is too low for a shard of step 0, whose prompts have 14 tokens",
            )
            for at in ((0, 1), (4, 5))
        ],
        (
            (2, 3),
            24,
            1,
            "24 is too low for a shard of step 0, whose prompts have 30 tokens",
        ),
    ],
)
def test_the_part_that_has_the_most_tokens_has_to_fit(
    long, most, parts, capacity, monkeypatch
):
    """Six prompts of 4 tokens, or of 7 at the places `long`, in 3 parts or as one."""
    questions = ["Tom has 5 apples ." if place in long else "5 ." for place in range(6)]
    problems = _encoded([Problem(question, (), "5") for question in questions])
    assert {len(prompt) for prompt in problems.prompts} == ({4, 7} if long else {4})
    monkeypatch.setattr(
        "slpo_jax.training.rollouts.batch_indices", lambda *_: np.arange(6)
    )
    if isinstance(capacity, str):
        with pytest.raises(ValueError, match=f"^max_tokens: {capacity}$"):
            make_batch(problems, 0, 0, 6, (40,), None, most, parts)
    else:
        assert (
            make_batch(problems, 0, 0, 6, (40,), None, most, parts).prompts.packed_slots
            == capacity
        )


def test_draw_numbers_by_hand():
    numbers = draw_numbers(np.array([2, 0, 2, 1, 2, 0]), 3)
    np.testing.assert_array_equal(numbers, [2, 0, 5, 1, 8, 3])
    assert numbers.dtype == np.int32


def test_an_example_that_comes_twice_in_a_batch_has_rollouts_of_its_own(monkeypatch):
    """Five of three problems, over the borders of epochs: no two rollouts have one key."""
    questions = (
        "Tom has 0 apples .",
        "Tom has 1 apples . He buys 3 .",
        "Tom has 2 apples .",
    )
    problems = _encoded([Problem(question, (), "5") for question in questions])
    group = 4
    batch = make_batch(problems, 1, 0, 5, (20,), None)
    indices = batch_indices(0, 1, 3, 5)
    assert len(set(indices.tolist())) < 5
    np.testing.assert_array_equal(batch.draw_ids % 3, indices)
    for row, index in enumerate(indices):
        np.testing.assert_array_equal(
            batch.prompts.tokens[row][batch.prompts.valid[row]], problems.prompts[index]
        )

    def sample(policy, params, prompts, keys_N, rule):
        return Trajectories(None, None, np.zeros((len(keys_N), 1), np.int32), keys_N)

    monkeypatch.setattr(rollouts, "sample", sample)
    made, _ = rollouts.roll_out(
        POLICY,
        None,
        batch,
        lambda tokens, references: tokens[:, 0],
        group,
        jax.random.key(0),
    )
    assert (
        len(
            {
                tuple(words)
                for words in np.asarray(jax.random.key_data(made.keys)).tolist()
            }
        )
        == 5 * group
    )
