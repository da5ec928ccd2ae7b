"""ProsQA in its published layouts: rows against what the published programs build, and short runs of both configs."""

import dataclasses
import json
from collections import Counter
from itertools import pairwise

import jax
import numpy as np
import pytest
from scipy import special

from slpo_jax.architectures.coconut import Coconut
from slpo_jax.config.config_checks import check
from slpo_jax.config.registry import read_config_file
from slpo_jax.data.batches import batch_indices, encode_problems
from slpo_jax.data.chat import PromptConfig
from slpo_jax.data.problems import load_problems
from slpo_jax.data.record_fields import FieldsConfig
from slpo_jax.data.tokenizer import load_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.training.recipes import frontier, imitate_config, recipe_of
from small_run import run
from small_steps import IMITATION, PROMPTS, imitation_batch, small_params
from tiny import SlowReasoner, compiled, real_tokens, slow_factors

IGNORED = -100  # what the published programs write for a position without a target
GRAPH_PROMPT = PromptConfig(format="<eos> {question}", closing="[A]")
GRAPHS = FieldsConfig(question="edges")


def _record(rng: np.random.Generator, hops: int, number: int) -> dict:
    """A graph with one or two shortest ways of so many edges, and a second end that can't be reached."""
    names = [f"{'bcdfg'[n % 5]}{'aeiou'[n // 5]}mpus" for n in rng.permutation(25)[:12]]
    root, *others = map(int, rng.permutation(12))
    names[root] = ("Tom", "Eve", "Max")[number % 3]
    chain = [root, *others[:hops]]
    twin = others[hops]
    (far, between, other) = others[hops + 1 : hops + 4]
    edges = [*map(list, pairwise(chain)), [far, between], [between, other]]
    twice = bool(rng.random() < 0.5)
    if twice:
        edges += [[root, twin], [twin, chain[2]]]

    def said(a: int, b: int) -> str:
        return (
            f"{names[a]} is a {names[b]}."
            if a == root
            else f"Every {names[a]} is a {names[b]}."
        )

    facts = [said(*edges[place]) for place in rng.permutation(len(edges))]
    layers = {
        str(k): [node, twin] if twice and k == 1 else [node]
        for k, node in enumerate(chain)
    }
    return {
        "question": f"{' '.join(facts)} Is {names[root]} a {names[chain[-1]]} or {names[other]}?",
        "answer": f"{names[root]} is a {names[chain[-1]]}.",
        "steps": [said(*pair) for pair in pairwise(chain)],
        "idx_to_symbol": names,
        "edges": edges,
        "root": root,
        "target": chain[-1],
        "neg_target": other,
        "neighbor_k": layers,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Six files in the two published layouts; that of sentences has no neighbor_k."""
    made = tmp_path_factory.mktemp("prosqa")
    rng = np.random.default_rng(0)
    for part, size in (("train", 24), ("valid", 6), ("test", 8)):
        records = [_record(rng, 3 + number % 2, number) for number in range(size)]
        (made / f"prosqa_{part}_graph_4_coconut.json").write_text(json.dumps(records))
        plain = [
            {key: value for key, value in record.items() if key != "neighbor_k"}
            for record in records
        ]
        (made / f"prosqa_{part}.json").write_text(json.dumps(plain))
    return made


def _recipe(name="curriculum", **changes):
    return recipe_of(
        dataclasses.replace(imitate_config(), recipe=name, **changes), "curriculum"
    )


def _row(batch, row: int, latent: int) -> tuple[list[int], list[int]]:
    """A row of ours as one sequence, with labels: prompt, a token for each latent, suffix."""
    prompt = real_tokens(batch.prompts, row).tolist()
    used = int(batch.suffix.weights[row].sum())
    before = [*prompt, *[latent] * int(batch.latents[row])]
    targets = batch.suffix.targets[row, :used].tolist()
    if not used:
        targets = [int(batch.nodes[row])]
        return before + targets, [IGNORED] * len(before) + targets
    fed = batch.suffix.tokens[row, :used].tolist()
    first = len(before) + 1  # the end marker has no target
    assert fed[1:] == targets[:-1]
    return [*before, fed[0], *targets], [IGNORED] * first + targets


# Sentences, on bytes: byte b is token b, then eos, start, end and latent.
EOS = 256
START = 257
END = 258
LATENT = 259


def _published_sentences(
    record: dict, stage: int, last: int
) -> tuple[list[int], list[int]]:
    """One example at a stage, c_thought 1 and pad_latent_to_max: dataset.py of facebookresearch/coconut."""
    latents, dropped = (last, 10_000) if stage > last else (stage, stage)
    before = [*f"{record['question']}\n".encode(), START, *[LATENT] * latents, END]
    steps = [
        byte for step in record["steps"][dropped:] for byte in f"{step}\n".encode()
    ]
    after = [*steps, *f"### {record['answer']}".encode(), EOS]
    return before + after, [IGNORED] * len(before) + after


@pytest.mark.parametrize("stage", range(8))
def test_rows_of_sentences_are_the_published_ones(folder, stage):
    problems = load_problems(str(folder / "prosqa_train.json"), answers="texts")
    records = json.loads((folder / "prosqa_train.json").read_text())
    template = Coconut().template(
        load_tokenizer("bytes"), prompt=PromptConfig(answers="texts")
    )
    ids = (template.eos_id, template.start_id, template.closing_ids, template.latent_id)
    assert ids == (EOS, START, (END,), LATENT)
    encoded = encode_problems(template, problems)
    recipe = _recipe(
        c_thought=1, max_latent_stage=6, cot_steps=5, stage_steps=5, final_steps=15
    )
    plan = recipe.phases(encoded, 6)
    assert [(phase.start, phase.end) for phase in plan] == [
        *((5 * n, 5 * n + 5) for n in range(7)),
        (35, 50),
    ]
    longest = max(map(len, encoded.prompts))
    batch = recipe.batch(
        encoded, plan[stage], 3, 1, 7, (longest,), recipe.slots(encoded, plan[stage])
    )
    examples = [
        _published_sentences(records[i], stage, 6)
        for i in batch_indices(1, 3, len(encoded), 7)
    ]
    assert [_row(batch, row, LATENT) for row in range(7)] == examples


# Graphs: stokenizer.py of Ber666/reasoning-by-superposition, but for its unused last token.
VOCABULARY = {str(n): n for n in range(31)} | {
    "<|start-latent|>": 31, "<|end-latent|>": 32, "<|latent|>": 33, "|": 34, "[Q]": 35, "[R]": 36, "[A]": 37,
    "<eos>": 38,
}  # fmt: skip


def _published_graph(
    record: dict, edges, ends, stage: int, said: str
) -> tuple[list[int], list[int]]:
    """One example after the shuffles, at its own stage: dataset.py, with eos after an answer."""
    question = (
        "<eos> "
        + "|".join(f" {a} {b} " for a, b in edges).strip()
        + f" [Q] {ends[0]} {ends[1]}"
    )
    question += f" [R] {record['root']}" + " <|latent|>" * stage
    if stage == len(record["steps"]):
        question = question + " [A]"
        said = f"{record['target']} <eos>"
    before, after = (
        [VOCABULARY[word] for word in text.split()] for text in (question, said)
    )
    return before + after, [IGNORED] * len(before) + after


@pytest.fixture(scope="module")
def graphs(folder):
    problems = load_problems(
        str(folder / "prosqa_train_graph_4_coconut.json"), fields=GRAPHS
    )
    records = json.loads((folder / "prosqa_train_graph_4_coconut.json").read_text())
    template = Coconut().template(load_tokenizer("nodes:30"), prompt=GRAPH_PROMPT)
    return encode_problems(template, problems), records


def _told(prompt: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """The edges in their order, and the two ends in theirs."""
    asked = prompt.index(VOCABULARY["[Q]"])
    inner = [n for n in prompt[1:asked] if n != VOCABULARY["|"]]
    return list(zip(inner[::2], inner[1::2], strict=True)), prompt[
        asked + 1 : asked + 3
    ]


def _graph_recipe(**changes):
    schedule = dict(
        c_thought=1, max_latent_stage=4, cot_steps=25, stage_steps=25, final_steps=175
    )
    return _recipe("frontier", **{**schedule, **changes})


@pytest.mark.parametrize("stage", range(6))
def test_rows_of_graphs_are_the_published_ones(graphs, stage):
    encoded, records = graphs
    recipe = _graph_recipe()
    phase = recipe.phases(encoded, 4)[stage]
    assert [phase.start, phase.end] == [
        25 * stage,
        300 if stage == 5 else 25 * stage + 25,
    ]
    batch = recipe.batch(
        encoded, phase, phase.start, 1, 9, (64,), recipe.slots(encoded, phase)
    )
    kinds = set()
    for row, index in enumerate(batch_indices(1, phase.start, len(encoded), 9)):
        record = records[index]
        prompt = real_tokens(batch.prompts, row).tolist()
        edges, ends = _told(prompt)
        assert sorted(map(list, edges)) == sorted(record["edges"])
        assert sorted(ends) == sorted([record["target"], record["neg_target"]])
        at = min(stage, len(record["steps"]))
        said = int(batch.nodes[row])
        if at < len(record["steps"]):
            assert said in record["neighbor_k"][str(at + 1)]
        kinds.add(at == len(record["steps"]))
        assert _row(batch, row, VOCABULARY["<|latent|>"]) == _published_graph(
            record, edges, ends, at, str(said)
        )
    assert kinds == ({False} if stage < 3 else {False, True} if stage == 3 else {True})


def test_whatever_is_drawn_is_drawn_anew_each_time(folder, graphs):
    """Orders of the edges and ends, and nodes of a step that has two, each as likely; stages by `mix`.

    What is read, where the target comes first, is shuffled alike each time.
    """
    encoded, records = graphs
    assert encoded.problems == tuple(
        load_problems(str(folder / "prosqa_train_graph_4_coconut.json"), fields=GRAPHS)
    )
    assert [each.answer for each in encoded.problems] == [
        str(record["target"]) for record in records
    ]
    pairs = list(zip(map(_told, encoded.prompts), records, strict=True))
    assert 4 < sum(ends[0] == record["target"] for (_, ends), record in pairs) < 20
    assert all(
        list(map(list, edges)) != record["edges"] for (edges, _), record in pairs
    )

    recipe = _graph_recipe(mix=0.5)
    phase = recipe.phases(encoded, 4)[3]
    place = next(i for i, r in enumerate(records) if len(r["neighbor_k"]["1"]) > 1)
    one = encoded.subset([place])
    record = records[place]
    first = Counter()
    orders = set()
    nodes = Counter()
    stages = Counter()
    for step in range(300):
        batch = recipe.batch(one, phase, step, 0, 2, (64,), recipe.slots(one, phase))
        for row in range(2):
            edges, ends = _told(real_tokens(batch.prompts, row).tolist())
            orders.add(tuple(edges))
            first[ends[0]] += 1
            stages[int(batch.latents[row])] += 1
            nodes[int(batch.nodes[row])] += int(batch.latents[row] == 0)
    assert len(orders) > 550
    assert set(first) == {record["target"], record["neg_target"]}
    assert min(first.values()) > 230  # of 600, by chance 300: five standard errors
    assert min(nodes[node] for node in record["neighbor_k"]["1"]) / stages[0] > 0.2
    own = min(3, len(record["steps"]))
    shares = np.array([stages[s] for s in range(own + 1)]) / 600
    np.testing.assert_allclose(
        shares, [0.5 / (own + 1)] * own + [0.5 + 0.5 / (own + 1)], atol=0.08
    )
    again = [
        recipe.batch(one, phase, 7, 0, 2, (64,), recipe.slots(one, phase))
        for _ in range(2)
    ]
    jax.tree.map(np.testing.assert_array_equal, *again)


@pytest.mark.slow
def test_loss_is_the_slow_loop_s():
    """Rows that say a node after 0 and 3 latents, and rows that answer."""
    rows = imitation_batch()
    answers = np.array([True, False, True, False])
    weights = rows.suffix.weights * answers[:, None]
    batch = frontier.FrontierBatch(
        rows.prompts, np.array([2, 0, 1, 3], np.int32), rows.suffix._replace(weights=weights), rows.draw_ids,
        stops=np.zeros(4, np.float32), nodes=np.array([0, 4, 0, 6], np.int32),
    )  # fmt: skip
    params = small_params()
    policy = IMITATION.with_config(dropout_rate=0.2)
    loss_fn = _graph_recipe().loss_of(policy)
    (loss, sums), grads = compiled(jax.value_and_grad(loss_fn, has_aux=True))(
        params, batch, jax.random.key(5)
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads["reasoner"]))
    assert float(sums["loss"][1]) == weights.sum() + 2
    slow = _slow(
        params, batch, policy.with_config(dropout_where="all"), jax.random.key(5)
    )
    assert float(loss) == pytest.approx(slow, rel=1e-5)


def _slow(params, batch, policy, key) -> float:
    reasoner = SlowReasoner(params["reasoner"])
    total = 0.0
    for row, length in enumerate(PROMPTS):
        prompt = real_tokens(batch.prompts, row)
        latents = int(batch.latents[row])
        used = int(batch.suffix.weights[row].sum())
        row_key = jax.random.fold_in(key, batch.draw_ids[row])
        config = policy.with_config(answer_slots=used).config
        reasoner.factors = slow_factors(row_key, row_key, length, latents, config)
        inputs = np.concatenate(
            [reasoner.embed(prompt), reasoner.think(prompt, latents)]
        )
        targets = batch.suffix.targets[row, :used].tolist() or [int(batch.nodes[row])]
        inputs = np.concatenate(
            [inputs, reasoner.embed(batch.suffix.tokens[row, :used])]
        )
        log_probs = special.log_softmax(
            reasoner.logits(reasoner.hidden(inputs)[-len(targets) :]), axis=-1
        )
        total -= sum(log_probs[place, target] for place, target in enumerate(targets))
    return total


@pytest.mark.parametrize(
    "change",
    [
        {"neighbor_k": None}, {"neighbor_k": {"1": [1], "2": [30]}}, {"neighbor_k": {"0": [0]}}, {"edges": []},
        {"edges": [[0, 1, 2]]}, {"root": "Tom"},
    ],
)  # fmt: skip
def test_another_layout_is_one_line(folder, tmp_path, change):
    record = (
        json.loads((folder / "prosqa_test_graph_4_coconut.json").read_text())[0]
        | change
    )
    (tmp_path / "x.json").write_text(json.dumps([record]))
    with pytest.raises(UserError, match=r"x\.json, record 1: .*edges"):
        load_problems(str(tmp_path / "x.json"), fields=GRAPHS)


def test_what_is_no_graph_is_one_line(folder, graphs):
    encoded = graphs[0]
    sentences = load_problems(str(folder / "prosqa_train.json"), answers="texts")
    plain = encode_problems(Coconut().template(load_tokenizer("bytes")), sentences)
    bare = encode_problems(
        encoded.template, [type(sentences[0])("0 2 | 1 3 4 [Q] 2 3 [R] 0", ("2",), "2")]
    )
    config = read_config_file("prosqa:graph")
    config.gate.enabled = True

    def small():
        encode_problems(
            Coconut().template(load_tokenizer("nodes:3"), prompt=GRAPH_PROMPT),
            encoded.problems,
        )

    for refused, said in (
        (lambda: load_problems(str(folder / "prosqa_test.json"), fields=GRAPHS), "'neighbor_k'.; write"),
        (small, r": the tokenizer doesn't know '\d+'.*, or another config.tokenizer$"),
        (lambda: load_tokenizer("nodes:all"), "nodes:all: its number is missing; write e.g. nodes:30"),
        (lambda: _graph_recipe().phases(plain, 4), "frontier is for graphs; set config.data.fields.question"),
        (lambda: _graph_recipe().phases(bare, 4), "config.data.train: a question is no `0 2"),
        (lambda: Coconut().template(load_tokenizer("nodes:30"), prompt=PromptConfig(closing="[A]")),
         "config.prompt.format: takes the place of COCONUT's markers together with"),
        (lambda: check(config), "config.evaluate.by_steps: True, but the gate says when a thought ends"),
        (lambda: read_config_file("prosqa:words"), "no such model; give sentences or graph"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            refused()


def test_the_tokenizer_is_the_published_one():
    tokenizer = load_tokenizer("nodes:30")
    assert tokenizer.get_vocab() == VOCABULARY | {"<unk>": 39}
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 38


def test_published_settings():
    """args/prosqa_coconut.yaml on 4 devices; args/prosqa_coconut_2l_8h_768d.yaml on 2, and its model's file."""
    words, graph = (
        check(read_config_file(f"prosqa:{which}"))
        for which in ("sentences", "graph,there")
    )
    epoch = 140
    own = words.imitate  # 17,886 problems by 4 x 32
    assert (
        own.c_thought,
        own.max_latent_stage,
        own.final_latents,
        words.max_latents,
    ) == (1, 6, "published", 6)
    assert (own.cot_steps, own.stage_steps) == (5 * epoch, 5 * epoch)
    assert own.cot_steps + 6 * own.stage_steps + own.final_steps == 50 * epoch
    assert (own.batch_size, own.reset_optimizer, own.mix, own.dropout) == (
        128,
        True,
        0.0,
        0.1,
    )
    for each in (own.optimizer, graph.imitate.optimizer):
        assert (
            each.name,
            each.learning_rate,
            each.weight_decay,
            each.decay_vectors,
        ) == ("adamw", 1e-4, 0.01, True)
        assert (each.clip_norm, each.schedule, each.warmup_steps) == (
            None,
            "constant",
            0,
        )
    assert (words.init, words.data.train) == (
        "openai-community/gpt2",
        "data/prosqa_train.json",
    )
    epoch = 58
    own = graph.imitate
    model = graph.model  # 14,785 problems by 2 x 128
    assert (own.recipe, own.c_thought, own.max_latent_stage, graph.max_latents) == (
        "frontier",
        1,
        4,
        4,
    )
    assert own.cot_steps == own.stage_steps == 25 * epoch
    assert own.cot_steps + 4 * own.stage_steps + own.final_steps == 300 * epoch
    assert (own.batch_size, own.reset_optimizer, own.mix, own.dropout) == (
        256,
        False,
        0.1,
        0.1,
    )
    assert (model.n_layer, model.n_head, model.n_embd, model.n_positions) == (
        2,
        8,
        768,
        1024,
    )
    assert graph.data.eval["prosqa"] == "there/prosqa_test_graph_4_coconut.json"


TINY = ("n_layer=1", "n_head=2", "n_embd=16")
SHORT = ("cot_steps=4", "stage_steps=2", "final_steps=4", "batch_size=8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "changes"),
    [
        (
            "sentences",
            ("init=", "tokenizer=bytes", "prompt_slots=(640,)", "max_answer_tokens=32"),
        ),
        ("graph", ("prompt_slots=(64,)",)),
    ],
)
def test_both_train_and_are_evaluated(folder, tmp_path, which, changes):
    flags = [f"--config.{each}" for each in changes]
    flags += [f"--config.model.{each}" for each in TINY] + [
        f"--config.imitate.{each}" for each in SHORT
    ]
    flags += [
        "--config.evaluate.samples=0",
        "--config.imitate.optimizer.learning_rate=1e-2",
    ]
    run(f"--config=prosqa:{which},{folder}", "--workdir=work", *flags, folder=tmp_path)
    work = tmp_path / "work"
    records = [
        json.loads(line)
        for line in (work / "eval" / "imitate" / "prosqa.jsonl")
        .read_text()
        .splitlines()
    ]
    assert [record["problem_steps"] for record in records] == [3, 4] * 4
    assert [record["latent_steps"] for record in records] == (
        [3, 4] * 4 if which == "graph" else [6] * 8
    )
    test = json.loads((folder / "prosqa_test.json").read_text())
    answers = [
        record["answer"] if which == "sentences" else str(record["target"])
        for record in test
    ]
    assert [record["reference"] for record in records] == answers
