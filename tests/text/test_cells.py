"""Cells of tables: chats, lists and dicts that a table has as texts, and values that are missing."""

import json

import numpy as np
import pandas
import pytest
from data_sets import write_jsonl

from slpo_jax.errors import UserError
from slpo_jax.text.cells import written
from slpo_jax.text.problem import Problem
from slpo_jax.text.problems import load_problems

ASKED = {"content": 'Tom\'s "Q"?\n[1]', "role": "user"}
TOLD = {"content": "He has 2.\nHe gets 3.\n\\boxed{5}", "role": "assistant"}
SOLVED = Problem(ASKED["content"], ("He has 2.", "He gets 3."), "5")
SHARED = [{"from": "human", "value": ASKED["content"]}, {"from": "gpt", "value": TOLD["content"]}]


def _array(*items):
    """What a cell holds that was read from parquet."""
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


# Records as they are before a table is written, whose cells hold chats.
CHATS = {
    "messages": {"messages": [ASKED, TOLD]},
    "conversations": {"conversations": SHARED},
    "prompt and completion": {"prompt": [ASKED], "completion": [TOLD]},
    "prompt and reward_model": {"prompt": [ASKED], "reward_model": {"ground_truth": "5", "style": "rule"}},
    "a question": {"question": [ASKED], "answer": "5"},
}


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("kind", ["to_csv", "to_csv of arrays", "json in a csv", "json in a jsonl"])
@pytest.mark.parametrize("answers", ["numbers", "latex", "texts"])
def test_chats_that_a_table_has_as_texts_are_chats(name, kind, answers, tmp_path):
    record, path = CHATS[name], tmp_path / "set.csv"
    as_json = {key: value if isinstance(value, str) else json.dumps(value) for key, value in record.items()}
    if kind == "json in a jsonl":
        path = write_jsonl(tmp_path / "set.jsonl", [as_json])
    else:
        arrays = {key: _array(*value) if isinstance(value, list) else value for key, value in record.items()}
        cells = {"to_csv": record, "to_csv of arrays": arrays, "json in a csv": as_json}[kind]
        pandas.DataFrame([cells]).to_csv(path, index=False)
    (problem,) = load_problems(str(path), answers=answers)
    assert (problem.question, problem.answer) == (SOLVED.question, "5")
    assert problem.steps == (SOLVED.steps if name in ("messages", "conversations", "prompt and completion") else ())


@pytest.mark.parametrize("field", ["messages", "conversations", "prompt", "question", "context", "cot", "solution"])
def test_what_begins_as_a_chat_and_is_none_is_a_line_and_no_question(field, tmp_path):
    broken = str([ASKED, TOLD])[:-9]
    record = {"question": "Q?", "answer": "5", field: broken} | ({"prompt": broken} if field == "solution" else {})
    if field not in ("question", "context", "cot", "solution"):
        del record["question"]
    path = write_jsonl(tmp_path / "set.jsonl", [record])
    with pytest.raises(UserError, match=rf"^{path}, line 1: field '({field}|prompt)' is (no|a) chat") as caught:
        load_problems(path, answers="texts")
    assert "\n" not in str(caught.value)
    for text in ("User: Q? Assistant: \\boxed{5}", "[1, 2]", json.dumps(json.dumps([ASKED, TOLD]))):
        path = write_jsonl(tmp_path / "set.jsonl", [{"messages": text}])
        with pytest.raises(UserError, match="field 'messages' is no chat; write"):
            load_problems(path, answers="latex")


@pytest.mark.parametrize(
    "value",
    [
        ["54", "it's 'b'", 'a "c"\n d', "back\\slash", "[x] {y}, 1 2"],
        {"text": ["54", "80"], "label": ["A", "B"]},
        [{"role": "user", "content": "nan, array(['x']) 'a' 'b'"}, {"role": "assistant", "content": None}],
    ],
)
def test_lists_and_dicts_are_what_was_written(value):
    def arrays(value):
        if isinstance(value, list):
            return _array(*map(arrays, value))
        return {name: arrays(inner) for name, inner in value.items()} if isinstance(value, dict) else value

    for text in (json.dumps(value), json.dumps(value, indent=1), str(value), str(arrays(value)), repr(arrays(value))):
        assert written(f" {text}\n") == value, text
    assert written("[54, 80.10]") == ["54", "80.10"]
    assert written(str(np.array([54, -80]))) == ["54", "-80"]
    assert [written(text) for text in ("a [1]", "[1", "[x]", "{1}", "[" * 100_000, "5", "")] == [None] * 7
