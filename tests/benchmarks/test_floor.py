"""The floor of a step: counts against numbers written out here and against XLA's, traces, and tables at tiny shapes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_step import ONE_CAPACITY as TINY
from test_step import PROMPTS
from tiny import policy_of

from benchmarks import floor
from benchmarks.measure import rates
from benchmarks.measure.counts import (
    Counts,
    Layout,
    Sizes,
    backward,
    position_counts,
    rollout_flops,
    sizes_of,
    total,
)
from benchmarks.measure.workload import load_config
from slpo_jax.models.gate import stopping_gate
from slpo_jax.models.gpt2 import GPT2Config
from slpo_jax.models.reasoner import coconut, codi
from slpo_jax.policy.policy import RolloutConfig
from slpo_jax.policy.prompted import Prompts
from slpo_jax.policy.rollout import Trajectories
from slpo_jax.policy.score import pass_keys, score

# A GPT-2 of one layer, D = 4, V = 10: kernels 4x12, 4x4, 4x16, 16x4.
SMALL = Sizes(layers=1, width=4, vocabulary=10, heads_width=4, keys_width=4, blocks=192, transition=0, gate=4,
              itemsize=4, trained=1000, moments=600)  # fmt: skip
# One prompt of 3 tokens in 4 slots, two rollouts: 1 latent and 2 answer tokens, 2 latents and 1 answer token.
LAYOUT = Layout(prompt_slots=4, latent_slots=3, answer_slots=2, group=2, passes=2)
LENGTHS, ANSWERS, LENGTH_OF_PROMPT = [1, 2], [2, 1], [3]


def test_counts_of_a_tiny_step_by_hand():
    useful = position_counts(LENGTHS, ANSWERS, LENGTH_OF_PROMPT, LAYOUT)["useful"]
    assert useful == {
        "prefill": Counts(positions=3 + 3, pairs=2 * (1 + 2 + 3), transitions=2, passes=1),
        # Keys that are seen: prompt, earlier latents, itself.
        "latent steps": Counts(3, (4) + (4 + 5), transitions=1, gates=3, passes=2, keys=3 + 3 + 4),
        "answer steps": Counts(3, (5 + 6) + (6), logits=3, passes=2, heads=2, keys=(4 + 5) + (5)),
        "score prompts": Counts(2 * 3, 2 * (1 + 2 + 3), transitions=2, passes=1),
        # tau + answer tokens are 3 in both rows, after a prompt of 3.
        "score trajectories": Counts(2 * 6, 2 * 2 * (4 + 5 + 6), transitions=2 * 1, gates=3, passes=1, keys=2 * 3),
        "score logits": Counts(logits=2 * 3, heads=1),
    }
    slots = position_counts(LENGTHS, ANSWERS, LENGTH_OF_PROMPT, LAYOUT)["slots"]
    keys = 4 + 3 + 2
    assert slots == {
        "prefill": Counts(2 * 4, 2 * 16, transitions=2, passes=1),
        "latent steps": Counts(4, 4 * keys, transitions=4, gates=4, passes=2, keys=4 * keys),
        "answer steps": Counts(4, 4 * keys, logits=4, passes=2, heads=2, keys=4 * keys),
        "score prompts": Counts(2 * 4, 2 * 16, transitions=2, passes=1),
        # Both rollouts' slots side by side: 2 * (3 + 2), each of which reads 4 + 10 keys.
        "score trajectories": Counts(2 * 10, 2 * 10 * 14, transitions=2 * 6, gates=2 * 3, passes=1, keys=8),
        "score logits": Counts(logits=2 * 2 * 2, heads=1),
    }


def test_flops_and_bytes_of_a_tiny_step_by_hand():
    useful = position_counts(LENGTHS, ANSWERS, LENGTH_OF_PROMPT, LAYOUT)["useful"]
    flops = {part: SMALL.flops(counts) for part, counts in useful.items()}
    assert flops == {
        "prefill": 2 * 192 * 6 + 16 * 12,
        "latent steps": 2 * 192 * 3 + 16 * 13 + 2 * 4 * 3,
        "answer steps": 2 * 192 * 3 + 16 * 17 + 2 * 40 * 3,
        "score prompts": 2 * 192 * 6 + 16 * 12,
        "score trajectories": 2 * 192 * 12 + 16 * 60 + 2 * 4 * 3,
        "score logits": 2 * 40 * 6,
    }
    forward = flops["score prompts"] + flops["score trajectories"] + flops["score logits"]
    assert SMALL.flops(backward(useful)) == 2 * forward
    again = Layout(4, 3, 2, group=2, passes=2, remat=True)
    assert SMALL.flops(backward(useful, again)) == 3 * forward
    moved = {part: SMALL.bytes(counts) for part, counts in useful.items()}
    assert moved["prefill"] == 4 * (192 + 2 * 4 * 6)
    assert moved["latent steps"] == 4 * (2 * 192 + 2 * 4 * (10 + 3))
    assert moved["answer steps"] == 4 * (2 * (192 + 40) + 2 * 4 * (14 + 3))
    assert moved["score logits"] == 4 * 40
    assert SMALL.optimizer_bytes == 2 * 1000 + 2 * 1000 + 2 * 600


def test_flops_of_rollouts_alone():
    """Of the same rollouts, by a model with the tiny one's kernels."""
    config = GPT2Config(vocab_size=10, n_positions=8, n_embd=4, n_layer=1, n_head=2)
    kernels = {name: {"kernel": np.zeros(shape)} for name, shape in
               (("c_attn", (4, 12)), ("attn_proj", (4, 4)), ("c_fc", (4, 16)), ("c_proj", (16, 4)))}  # fmt: skip
    params = {"reasoner": {"backbone": {"wte": np.zeros((10, 4)), **kernels}}, "gate": {"out": {"kernel": np.zeros(4)}}}
    thinking, answering = 2 * 192 * 3 + 16 * 13 + 2 * 4 * 3, 2 * 192 * 3 + 16 * 17 + 2 * 40 * 3
    for noisy, copies in ((True, 2), (False, 1)):
        flops = rollout_flops(config, params, LENGTHS, ANSWERS, LENGTH_OF_PROMPT, noisy)
        assert flops == copies * (2 * 192 * 3 + 16 * 6) + thinking + answering


def test_scored_slots_are_those_of_the_smallest_capacity_that_fits():
    """Of 6 latent and 4 answer slots of a prompt 3 and 3 are used."""
    for capacities, packed in (
        (((0.5, 0.75), (1.0, 1.0)), (3, 3)),
        (((0.5, 0.5), (1.0, 1.0)), (6, 4)),
        (((0.3, 0.75), (0.6, 0.8), (1.0, 1.0)), (4, 4)),
    ):
        layout = Layout(4, 3, 2, group=2, passes=1, capacities=capacities)
        slots = position_counts(LENGTHS, ANSWERS, LENGTH_OF_PROMPT, layout)["slots"]
        assert slots["score trajectories"].positions == sum(packed)
        assert slots["score logits"].logits == packed[1]


def test_prompts_without_noise_are_encoded_once():
    quiet = Layout(4, 3, 2, group=2, passes=2, noisy_prompts=False)
    useful, slots = position_counts(LENGTHS, ANSWERS, LENGTH_OF_PROMPT, quiet).values()
    assert (useful["prefill"].positions, slots["prefill"].positions) == (3, 4)
    assert (useful["score prompts"].positions, slots["score prompts"].positions) == (3, 4)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_useful_is_never_more_than_slots(shards):
    rng = np.random.default_rng(shards)
    layout = Layout(9, 6, 4, group=3, passes=2, shards=shards)
    lengths, answers = rng.integers(1, 7, size=24), rng.integers(1, 5, size=24)
    counts = position_counts(lengths, answers, rng.integers(1, 10, size=8), layout)
    turns = lengths.reshape(shards, -1).max(axis=1)  # each shard stops by itself
    assert counts["slots"]["latent steps"].positions == turns.sum() * 24 // shards
    for part, useful in counts["useful"].items():
        assert 0 < SMALL.flops(useful) < SMALL.flops(counts["slots"][part])
        assert SMALL.bytes(useful) <= SMALL.bytes(counts["slots"][part])
    # With everything full there is nothing to save but what the causal mask hides.
    full = position_counts([6] * 24, [4] * 24, [9] * 8, layout)
    for part, useful in full["useful"].items():
        assert useful.positions == full["slots"][part].positions
        assert useful.logits == full["slots"][part].logits


def test_sizes_of_a_model():
    config = GPT2Config(vocab_size=10, n_positions=8, n_embd=4, n_layer=1, n_head=2, dtype=jnp.bfloat16)
    gate = stopping_gate(4)

    def params(reasoner):
        return jax.eval_shape(lambda key: {"reasoner": reasoner.init(key), "gate": gate.init(key)}, jax.random.key(0))

    state = {"moment": jnp.zeros(150, jnp.float32)}
    tree = params(coconut(config))
    trained = 4 * sum(x.size for x in jax.tree.leaves(tree))
    expected = SMALL.__dict__ | {"itemsize": 2, "trained": trained}
    assert sizes_of(config, tree, state).__dict__ == expected
    assert sizes_of(config, params(codi(config, hidden=6))).transition == 4 * 6 + 6 * 4


def test_xla_counts_a_product_as_we_do():
    a, b = jnp.ones((30, 40)), jnp.ones((40, 50))
    program = jax.jit(jnp.matmul).lower(a, b).compile()
    assert program.cost_analysis()["flops"] == 2 * 30 * 40 * 50


@pytest.mark.slow
def test_xla_counts_a_scoring_pass_as_we_do():
    """Wide enough that elementwise work is a few per cent, with layers enough that the last one's savings are, too."""
    config = GPT2Config(vocab_size=300, n_positions=64, n_embd=128, n_layer=4, n_head=4)
    reasoner, rows = coconut(config), 4
    layout = Layout(prompt_slots=8, latent_slots=5, answer_slots=4, group=2, passes=1)
    policy = policy_of(RolloutConfig(5, 4, end_id=7, eos_ids=(8,), pad_id=9, dropout_rate=0.0), reasoner)
    params = jax.eval_shape(reasoner.init, jax.random.key(0))
    prompts = Prompts(jnp.zeros((2, 8), jnp.int32), jnp.ones((2, 8), bool))
    tokens, keys = jnp.zeros((rows, 4), jnp.int32), jax.random.split(jax.random.key(0), rows)
    sampled = Trajectories(jnp.zeros((rows, 5, 128)), jnp.full(rows, 5), tokens, keys)
    noise = jax.tree.map(lambda x: x.squeeze(0), pass_keys(jax.random.key(0), jnp.arange(2), 2, 1))

    def forward(params):
        scores = score(policy, {"reasoner": params}, prompts, sampled, noise)
        return scores.actions, scores.answer_log_prob

    found = jax.jit(forward).lower(params).compile().cost_analysis()["flops"]
    counts = position_counts([5] * rows, [4] * rows, [8, 8], layout)["slots"]
    gate = {"kernel": jnp.zeros((0, 1))}
    ours = sizes_of(config, {"reasoner": params, "gate": gate}).flops(
        total(counts, ("score prompts", "score trajectories", "score logits"))
    )
    assert 0.9 < found / ours < 1.15


@pytest.fixture(scope="module")
def result(cpu_devices):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(floor, "BASE", (2, 2))
        patch.setattr(rates, "SECONDS", 0.0)
        patch.setattr(rates, "CHAIN_FLOPS", {"cpu": 1e6})
        found = rates.machine_rates(squares=(32, 48), stream_bytes=2**16)
        return floor.benchmark("quickstart", TINY, load_config(TINY), PROMPTS, runs=2, rates=found)


@pytest.mark.slow
def test_rates_are_sensible(result):
    found = result["rates"]
    for rate in [found["bandwidth"], *found["matmul"].values(), *found["model_shapes"]]:
        assert 0 < rate["median"] <= rate["best"] < 1e16
    squares = found["squares"]["float32"]
    assert found["matmul"]["float32"]["best"] == max(rate["best"] for rate in squares.values())
    products = [*squares.values(), *(row for row in found["model_shapes"] if row["dtype"] == "float32")]
    assert found["flop_rate"] == max(rate["best"] for rate in products)
    rows = {row["what"]: row["rows"] for row in found["model_shapes"]}
    per_shard = PROMPTS * 2 // result["layout"]["shards"]
    assert rows == {"scoring pass": 2 * per_shard * (4 + 5), "decode step": per_shard}


@pytest.mark.slow
def test_parts_add_up(result):
    parts, found = result["parts"], result["rates"]
    for part, row in parts.items():
        assert row["useful"] <= row["slots"]
        assert row["floor"] > 0, part
    for name in ("useful", "slots", "bytes", "floor"):
        leaves = ("prefill", "latent steps", "answer steps", "score prompts", "score trajectories", "score logits",
                  "backward", "optimizer")  # fmt: skip
        np.testing.assert_allclose(sum(parts[leaf][name] for leaf in leaves), parts["step"][name])
    prefill = parts["prefill"]
    times = prefill["useful"] / found["flop_rate"], prefill["bytes"] / found["bandwidth"]["best"]
    assert prefill["floor"] == max(times)
    assert prefill["binds"] == ("matmul" if times[0] > times[1] else "memory")
    step = parts["step"]
    np.testing.assert_allclose(step["over_floor"], step["seconds"] / step["floor"])
    np.testing.assert_allclose(step["rate"], step["slots"] / step["seconds"])


@pytest.mark.slow
def test_report_has_every_part_and_the_json_every_number(result):
    assert json.loads(json.dumps(result)) == result
    text = floor.markdown(result)
    for section in text.split("\n## ")[1:]:
        for table in section.split("\n\n")[1:]:
            assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) <= 1
    for part in result["parts"]:
        assert f"\n| {part} |" in text
    for kind in result["profile"]["kinds"]:
        assert f"\n| {kind} |" in text
    assert result["profile"]["devices"] == result["layout"]["shards"]
    assert len(result["profile"]["heaviest"]) == 10
