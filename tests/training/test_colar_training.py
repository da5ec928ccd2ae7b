"""CoLaR's and ReGuLaR's training against a loop over rows and positions in float64."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import tiny
from slow_policy import as_float64, colar_law
from slpo_jax.architectures.coconut import Coconut
from slpo_jax.architectures.colar import Colar
from slpo_jax.data.batches import encode_problems
from slpo_jax.data.chat import PromptConfig, at_speed
from slpo_jax.data.problem import Problem
from slpo_jax.data.tokenizer import task_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.models.reasoner import StepProjector
from slpo_jax.policy import noise
from slpo_jax.policy.policy import RolloutConfig
from slpo_jax.training.recipes import imitate_config, recipe_of
from slpo_jax.training.recipes.colar_recipe import PROJECTOR, pool
from tiny import SlowReasoner, compiled, policy_of, real_tokens

STEPS = (
    ("2 + 3 = 5",),
    ("4 - 1 = 3", "3 + 2 = 5"),
    ("1 + 1 = 2", "2 + 5 = 7", "7 - 4 = 3"),
)
PROBLEMS = tuple(
    Problem(f"Tom has {n} pens .", steps, steps[-1].split()[-1])
    for n, steps in enumerate(STEPS)
)
SCALE = 0.3
ROWS = 4
TEMPLATE = Colar(8).template(
    task_tokenizer("synthetic", 20), prompt=PromptConfig(speed=1)
)
IDS = TEMPLATE.tokenizer.get_vocab()
CONFIG = dataclasses.replace(
    tiny.CONFIG, vocab_size=len(TEMPLATE.tokenizer), n_positions=96
)
REASONER = Colar(12, SCALE, gaussian=True).on(CONFIG)
ROLLOUT = RolloutConfig(
    8, 4, TEMPLATE.closing_ids, TEMPLATE.eos_ids, TEMPLATE.pad_id, dropout_rate=0.0
)
POLICY = policy_of(ROLLOUT, REASONER, "colar")
ENCODED = encode_problems(TEMPLATE, PROBLEMS)


def _recipe(name: str):
    few = dict(cot_steps=2, final_steps=40, batch_size=ROWS)
    return recipe_of(dataclasses.replace(imitate_config(), recipe=name, **few), "colar")


def _case(name: str, phase: int = 1, step: int = 3):
    recipe = _recipe(name)
    plan = recipe.phases(ENCODED, 8)
    batch = recipe.batch(
        ENCODED, plan[phase], step, 1, ROWS, (24,), recipe.slots(ENCODED, plan[phase])
    )
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.4, jnp.float32)  # noqa: E731
    params = {
        "reasoner": jax.tree.map(draw, jax.eval_shape(REASONER.init, jax.random.key(0)))
    }
    params["gate"] = tiny.random_gate()
    if recipe.init:
        params |= jax.tree.map(
            draw, jax.eval_shape(lambda: recipe.init(jax.random.key(1), POLICY, params))
        )
    return SimpleNamespace(recipe=recipe, batch=batch, params=params)


def _projected(params, code_D):
    """Linear, GroupNorm, GELU, Linear, GroupNorm of one group."""
    p = as_float64(params[PROJECTOR])

    def norm(x_D, groups, name):
        parts = x_D.reshape(groups, -1)
        parts = (parts - parts.mean(axis=1, keepdims=True)) / np.sqrt(
            parts.var(axis=1, keepdims=True) + 1e-5
        )
        return parts.reshape(-1) * p[name]["scale"] + p[name]["bias"]

    x = norm(code_D @ p["Dense_0"]["kernel"] + p["Dense_0"]["bias"], 2, "GroupNorm_0")
    x = x * 0.5 * (1 + special.erf(x / math.sqrt(2)))
    return SCALE * norm(
        x @ p["Dense_1"]["kernel"] + p["Dense_1"]["bias"], 1, "GroupNorm_1"
    )


def _slow_loss(case, name: str, speed: int, key, rate=0.0):
    """(cross-entropy, the head's loss), as means over the whole batch, of texts put together from words.

    And of each row its likeliest tokens, and how many of them come before the answer's.
    """
    slow = SlowReasoner(case.params["reasoner"], CONFIG)
    batch = case.batch
    said = []
    latent = []
    likeliest = []
    for row, index in enumerate(np.asarray(batch.draw_ids) % len(PROBLEMS)):
        problem = PROBLEMS[index]
        asked = f"Question: {problem.question} Let's think step by step:(Thinking speed: {speed})"
        prompt = TEMPLATE.tokenizer(asked, add_special_tokens=False)["input_ids"]
        assert real_tokens(batch.prompts, row).tolist() == prompt
        steps = [
            [IDS[word] for word in (*step.split(), "\n")] for step in problem.steps
        ]
        flat = [token for step in steps for token in step]
        chunks = (
            steps
            if name == "regular"
            else [flat[at : at + speed] for at in range(0, len(flat), speed)]
        )
        vectors = [
            slow.embed(chunk).sum(axis=0) / (len(chunk) ** 0.5 + 1e-5)
            for chunk in chunks
        ]
        if name == "regular":
            vectors = [_projected(case.params, vector) for vector in vectors]
        mark = IDS["###"]
        answer = [IDS["Answer:"], IDS[problem.answer], TEMPLATE.eos_id]
        fed = np.concatenate(
            [slow.embed([mark]), vectors, slow.embed([mark, *answer[:-1]])]
        )
        row_key = noise.row_keys(key, batch.draw_ids)[row]
        config = POLICY.config
        noisy = dataclasses.replace(
            config, dropout_rate=rate, dropout_where="all", answer_slots=len(fed)
        )
        slow.factors = tiny.slow_factors(row_key, row_key, len(prompt), 0, noisy)
        hidden = slow.hidden(np.concatenate([slow.embed(prompt), fed]))[
            len(prompt) - 1 :
        ]
        targets = np.asarray(batch.targets)[row, : len(hidden)].tolist()
        assert targets[0] == targets[1 + len(chunks)] == mark
        assert all(
            label in chunk for label, chunk in zip(targets[1:], chunks, strict=False)
        )
        assert targets[2 + len(chunks) :] == answer
        log_probs = special.log_softmax(slow.logits(hidden), axis=-1)
        likeliest.append((log_probs.argmax(axis=-1), 2 + len(chunks)))
        said += [-log_probs[at, target] for at, target in enumerate(targets)]
        keys = noise.draw_keys(row_key[None], jnp.arange(len(chunks) + 1))[0]
        for at in range(
            len(chunks) + 1
        ):  # the mark that begins, and each chunk but that the last predicts the mark
            mean, std = colar_law(case.params, hidden[1 + at])
            aim = fed[1 + at] / SCALE
            n = np.asarray(jax.random.normal(keys[at], mean.shape), np.float64)
            latent.append(np.square(mean + std * n - aim).mean())
    return np.mean(said), np.mean(latent), likeliest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rate"), [("colar", 0.0), ("regular", 0.0), ("colar", 0.3)]
)
def test_losses_are_the_slow_loop_s(name, rate):
    case = _case(name)
    key = jax.random.key(5)
    asked = TEMPLATE.tokenizer.decode(real_tokens(case.batch.prompts, 0))
    speed = int(asked.rpartition("speed: ")[2][0])
    assert speed == (1 if name == "regular" else 3)
    total, sums = compiled(case.recipe.loss_of(POLICY.with_config(dropout_rate=rate)))(
        case.params, case.batch, key
    )
    said, latent, _ = _slow_loss(case, name, speed, key, rate)
    means = {name: float(total / count) for name, (total, count) in sums.items()}
    assert means["said"] == pytest.approx(said, rel=1e-3)
    assert means["latent"] == pytest.approx(latent, rel=1e-3)
    assert float(total) / ROWS == pytest.approx(said + latent, rel=1e-3)


def test_words_are_judged_whole_and_beside_latents_the_answers_alone():
    case = _case("colar")
    key = jax.random.key(5)
    *_, likeliest = _slow_loss(case, "colar", 3, key)
    targets = np.array(case.batch.targets)
    for row, begin in (
        (0, 0),
        (1, likeliest[1][1]),
    ):  # all of the first row is right, of the second its answer
        tokens = likeliest[row][0]
        targets[row, begin : len(tokens)] = tokens[begin:]
    for more, name, right in (
        ({}, "answered", 2),
        ({"predicted": None}, "accuracy", 1),
    ):
        batch = case.batch.replace(targets=targets, **more)
        _, sums = compiled(case.recipe.loss_of(POLICY.with_config(dropout_rate=0.0)))(
            case.params, batch, key
        )
        assert [float(x) for x in sums[name]] == [right, ROWS]
        assert not {"answered", "accuracy"} - {name} & sums.keys()


def test_the_projector_is_a_loop_s():
    """To a finer tolerance than a loss has, which hardly knows how many groups a norm is of."""
    params = _case("regular").params
    codes = np.random.default_rng(1).normal(size=(5, CONFIG.n_embd)).astype(np.float32)
    found = StepProjector(CONFIG.n_embd).apply({"params": params[PROJECTOR]}, codes)
    np.testing.assert_allclose(
        SCALE * found, [_projected(params, code) for code in codes], atol=1e-5
    )


def test_a_chunk_s_input_is_of_its_tokens_alone():
    """Their embeddings' sum by the root of their number; of the marks and the answer the embedding."""
    case = _case("colar", step=2)
    table = np.asarray(case.params["reasoner"]["backbone"]["wte"], np.float64)
    batch = case.batch
    found = np.asarray(pool(POLICY, case.params, batch))
    sizes = np.asarray(batch.sizes)
    assert len(set(sizes[batch.chunks].tolist())) > 2
    for row, slot in np.argwhere(sizes > 0).tolist():
        size = int(sizes[row, slot])
        by = size**0.5 + 1e-5 if batch.chunks[row, slot] else 1
        expected = table[np.asarray(batch.ids)[row, slot, :size]].sum(axis=0) / by
        np.testing.assert_allclose(found[row, slot], expected, rtol=2e-6, atol=1e-7)
    words = _case(
        "colar", phase=0, step=0
    ).batch  # the CoT model's text is of single tokens
    assert (words.predicted, words.sizes.max()) == (None, 1)


def test_speeds_and_labels_are_drawn():
    recipe = _recipe("colar")
    _, phase = recipe.phases(ENCODED, 8)
    slots = recipe.slots(ENCODED, phase)
    seen = set()
    labels = set()
    firsts = set()
    for step in range(2, 42):
        batch = recipe.batch(ENCODED, phase, step, 1, ROWS, (24,), slots)
        asked = {
            TEMPLATE.tokenizer.decode(real_tokens(batch.prompts, row))[-2]
            for row in range(ROWS)
        }
        assert len(asked) == 1
        seen |= asked
        if asked == {"5"}:
            chunk = batch.chunks.ravel()
            is_label = (
                batch.ids.reshape(-1, 5)[chunk]
                == batch.targets[:, :-1].reshape(-1, 1)[chunk]
            )
            firsts.add(int(is_label[0].argmax()))
            labels |= {*is_label[is_label.any(axis=1)].argmax(axis=1).tolist()}
    assert seen == set("12345")
    assert len(labels) > 1
    assert len(firsts) > 1, "what a label is doesn't follow from the speed"


@pytest.mark.slow
def test_what_is_said_trains_the_projector():
    """Through the inputs, each part of it, and without the head."""
    case = _case("regular")
    loss = case.recipe.loss_of(POLICY)
    grads = compiled(jax.grad(lambda p, b, k: loss(p, b, k)[1]["said"][0]))(
        case.params, case.batch, jax.random.key(0)
    )
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads[PROJECTOR]))
    assert not np.any(grads["reasoner"]["head"]["mean"]["kernel"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["colar", "regular"])
def test_the_head_s_aims_and_regular_s_codes_are_constants(name):
    """Of a head that looks at nothing: its loss moves it alone, no embedding and no projector that aims are made of."""
    case = _case(name)
    loss = case.recipe.loss_of(POLICY)
    head = case.params["reasoner"]["head"]
    gradient = compiled(jax.grad(lambda p, b, k: loss(p, b, k)[1]["latent"][0]))
    blind = {
        part: {**head[part], "kernel": 0 * head[part]["kernel"]}
        for part in ("mean", "log_std")
    }
    params = case.params | {
        "reasoner": case.params["reasoner"] | {"head": head | blind}
    }
    moved = jax.tree.leaves_with_path(gradient(params, case.batch, jax.random.key(0)))
    last = {
        f"['reasoner']['head']['{part}']['{leaf}']"
        for part in blind
        for leaf in ("bias", "kernel")
    }
    assert {jax.tree_util.keystr(at) for at, leaf in moved if np.any(leaf)} == last
    table = gradient(case.params, case.batch, jax.random.key(0))["reasoner"][
        "backbone"
    ]["wte"]
    assert np.any(table[IDS["="]]) == (name == "colar")  # which only steps have
    assert np.any(table[IDS["###"]])


@pytest.mark.parametrize(
    ("name", "template", "words"),
    [
        (
            "colar",
            Coconut().template(task_tokenizer("synthetic", 20)),
            "config.reasoner: only CoLaR's is asked at a",
        ),
        (
            "regular",
            at_speed(TEMPLATE, 2),
            "config.prompt.speed: the recipe regular asks at speed 1 always; set it to",
        ),
    ],
)
def test_what_can_t_be_trained(name, template, words):
    with pytest.raises(UserError, match=words):
        _recipe(name).phases(encode_problems(template, PROBLEMS), 8)


def test_simcot_does_not_explain_its_latents():
    with pytest.raises(UserError, match="colar"):
        recipe_of(dataclasses.replace(imitate_config(), recipe="simcot"), "colar")
