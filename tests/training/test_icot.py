"""iCoT's schedule, offsets and texts against loops and by hand, and its loss against a plain GPT-2's."""

import dataclasses

import jax
import numpy as np
import pytest
from scipy import stats

from slpo_jax.architectures.coconut import Coconut
from slpo_jax.data.batches import batch_indices, encode_problems
from slpo_jax.data.problem import Problem
from slpo_jax.data.tokenizer import task_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.models.gpt2 import GPT2Config
from slpo_jax.policy.policy import RolloutConfig
from slpo_jax.training.recipes import ImitateSettings, Phase
from slpo_jax.training.recipes.curriculum import Internalization
from slpo_jax.training.recipes.recipe import Draw
from tiny import SlowReasoner, compiled, policy_of, real_tokens

STEPS = (
    ("2 + 3 = 5",),
    ("4 - 1 = 3", "3 x 2 = 6"),
    ("1 + 1 = 2", "2 + 5 = 7", "7 - 4 = 3"),
    (),
)
PROBLEMS = encode_problems(
    Coconut().template(task_tokenizer("synthetic", 20)),
    [
        Problem(f"Tom has {n} pens .", steps, str(n + 4))
        for n, steps in enumerate(STEPS)
    ],
)
CHAINS = tuple(
    "".join(f"{step} | " for step in steps).split() for steps in STEPS
)  # "|" for a line break
LONGEST = 18
BATCH = 8
SEED = 5
NEVER = 1e6  # lambda, at which o is 0
WAY = Internalization()
SETTINGS = ImitateSettings(c_thought=0, cot_steps=10, final_steps=60, batch_size=BATCH)
PHASE = Phase("icot", 10, 10 + 3 * LONGEST, 0, 0, 0, 3)


def _batch(way, problems, phase, step, slots=(32,)):
    return way(SETTINGS).batch(problems, phase, step, SEED, BATCH, (12,), (slots,))


def _draw(step, seed=SEED, rows=64):
    return Draw(None, PHASE, step, seed, np.arange(rows), (), ())


def _words(ids):
    """Ids as words, the line break as "|"."""
    return (
        " ".join(
            PROBLEMS.template.tokenizer.convert_ids_to_tokens([int(i) for i in ids])
        )
        .replace("\n", "|")
        .split()
    )


def _rows(problems, batch):
    """(problem, the words that the loss is of) of each row."""
    for row, index in enumerate(batch.draw_ids % len(problems)):
        used = batch.suffix.weights[row] > 0
        assert _words(batch.suffix.tokens[row][used])[0] == "<|end-latent|>"
        assert used.tolist() == sorted(used, reverse=True)
        yield index, _words(batch.suffix.targets[row][used])


def _published(batches, per_token, all_from):
    """s of each batch by the published program's counter."""
    found = []
    s = 0
    counter = 0
    for _ in range(batches):
        if counter == per_token:
            s = s + 1
            counter = 0
        counter += 1
        found.append(s if s < all_from else np.inf)
    return found


@pytest.mark.parametrize(("all_from", "gone"), [(39, 18), (7, 7)])
def test_the_schedule_is_the_published_counter_s(all_from, gone):
    """150 problems of a batch of 8 are 19 steps, and at 8 tokens an epoch round(19 / 8) = 2 of them a token."""
    many = PROBLEMS.subset(np.arange(150) % 4)
    way = Internalization(all_from=all_from, offset_decay=NEVER)
    plan = way(SETTINGS).phases(many, 0)
    icot = ("icot", 10, 10 + 2 * gone, 0, 0, 0, 2)
    final = ("final", 10 + 2 * gone, 70, None, 0, 0, 0)
    assert [dataclasses.astuple(phase)[:7] for phase in plan] == [
        ("cot", 0, 10, 0, 0, 0, 0),
        icot,
        final,
    ]
    for step, s in enumerate(_published(60, 2, all_from), start=10):
        phase = next(phase for phase in plan if phase.start <= step < phase.end)
        batch = _batch(way, many, phase, step)
        assert [index % 4 for index in batch.draw_ids] == [
            i % 4 for i in batch_indices(SEED, step, 150, BATCH)
        ]
        for index, words in _rows(many, batch):
            chain = CHAINS[index % 4]
            kept = chain[int(min(s, len(chain))) :]
            assert words == [*kept, "###", str(index % 4 + 4), "<eos>"]


def test_a_token_a_step_at_least():
    assert WAY.pace(SETTINGS, PROBLEMS)[0] == 1
    # 161 are 21 batches of 8, the last with one in it.
    many = PROBLEMS.subset(np.arange(161) % 4)
    assert WAY.pace(SETTINGS, many)[0] == round(21 / 8)
    # "Tom has 0 pens . |", "<start>", six tokens a step and "### 4"; of those of at most two steps the longest is 12.
    assert WAY.pace(dataclasses.replace(SETTINGS, max_tokens=21), PROBLEMS)[1] == 12


@pytest.mark.parametrize("decay", [4.0, 0.5])
def test_offsets_have_their_law(decay):
    way = dataclasses.replace(WAY, offset_decay=decay)
    steps = range(PHASE.start, PHASE.start + 2000)
    offsets = [way.draw_removed(_draw(step)) - (step - 10) // 3 for step in steps]
    found = np.bincount(np.concatenate(offsets))
    weights = np.exp(-decay * np.arange(100))
    expected = weights / weights.sum() * found.sum()
    last = int(np.argmax(expected < 10))  # all beyond are one class
    classes = [np.append(each[:last], each[last:].sum()) for each in (found, expected)]
    assert stats.chisquare(*classes).pvalue > 0.01
    assert stats.pearsonr(offsets[0], offsets[1]).pvalue > 0.01


def test_loss_is_a_plain_gpt2_s_on_texts_by_hand():
    """The mean over all tokens after the question, at s = o = 0 and where all is gone; one program for both."""
    config = GPT2Config(
        vocab_size=len(PROBLEMS.template.tokenizer),
        n_positions=48,
        n_embd=8,
        n_layer=1,
        n_head=2,
    )
    reasoner = Coconut().on(config)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(reasoner.init, jax.random.key(0))
    params = jax.tree.map(lambda x: np.float32(0.3 * rng.normal(size=x.shape)), shapes)
    template = PROBLEMS.template
    rollout = RolloutConfig(
        0, 4, template.closing_ids, template.eos_id, template.pad_id, dropout_rate=0.0
    )
    loss_fn = compiled(WAY(SETTINGS).loss_of(policy_of(rollout, reasoner)))
    never = dataclasses.replace(WAY, offset_decay=NEVER)
    slow = SlowReasoner(params, config)
    for start, drops in ((PHASE.start, False), (PHASE.start - 3 * LONGEST, True)):
        batch = _batch(
            never, PROBLEMS, dataclasses.replace(PHASE, start=start), PHASE.start
        )
        _, sums = loss_fn({"reasoner": params}, batch, jax.random.key(0))
        total = 0.0
        count = 0
        for row, index in enumerate(batch.draw_ids % 4):
            text = [
                "<|end-latent|>",
                *([] if drops else CHAINS[index]),
                "###",
                str(index + 4),
                "<eos>",
            ]
            ids = template.tokenizer.convert_tokens_to_ids(
                ["\n" if word == "|" else word for word in text]
            )
            prompt = real_tokens(batch.prompts, row)
            assert (
                _words(prompt) == f"Tom has {index} pens . | <|start-latent|>".split()
            )
            total -= slow.log_probs(slow.embed([*prompt, ids[0]]), ids[1:]).sum()
            count += len(ids) - 1
        assert float(sums["loss"][1]) == count
        assert float(sums["loss"][0]) == pytest.approx(total, rel=1e-4)


def test_one_line_for_what_can_not_be():
    said = r"^config\.imitate\.final_steps: 54, but iCoT drops the last token after 54 steps"
    with pytest.raises(UserError, match=said):
        WAY(dataclasses.replace(SETTINGS, final_steps=54)).phases(
            PROBLEMS.subset(np.arange(24 * BATCH) % 4), 0
        )
    with pytest.raises(UserError, match=r"^config\.max_latents: 2.*iCoT"):
        WAY(SETTINGS).phases(PROBLEMS, 2)
