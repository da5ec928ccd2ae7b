"""Cells of tables: chats, lists and dicts that a table has as texts, and values that are missing."""

import json

import numpy as np
import pandas
import pytest
from data_sets import write_jsonl

from slpo_jax.data.cells import written
from slpo_jax.data.problem import Problem
from slpo_jax.data.problems import load_problems
from slpo_jax.data.record_fields import FieldsConfig
from slpo_jax.errors import UserError

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
        with pytest.raises(UserError, match=r"field 'messages' is no chat; write .*TEXT}\]$"):
            load_problems(path, answers="latex")
    with pytest.raises(UserError, match="record 1: field 'text' is no chat"):
        load_problems([{"text": "Q? It is \\boxed{5}"}], answers="latex", fields=FieldsConfig("text", "text"))


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


# What stands for nothing, by the kind of source; the words are those of pandas.
NOTHING = {
    "csv": ["", "nan", "NaN", "None", "NULL", "<NA>", "N/A", " null "],
    "jsonl": [None, float("nan"), "None"],
    "parquet": [None, float("nan")],
    "records": [None, float("nan"), np.float32("nan"), pandas.NA, pandas.NaT, np.nan],
    "frame": [None, float("nan"), pandas.NA, pandas.NaT],
}


def _source(path, kind, records):
    """The records as a kind of source has them."""
    if kind == "records":
        return records
    frame = pandas.DataFrame(records)
    if kind == "frame":
        return frame
    if kind == "csv":
        frame.to_csv(path / "set.csv", index=False)
    if kind == "parquet":
        frame.to_parquet(path / "set.parquet")
    return write_jsonl(path / "set.jsonl", records) if kind == "jsonl" else str(path / f"set.{kind}")


@pytest.mark.parametrize("kind", NOTHING)
@pytest.mark.parametrize(
    "field", ["steps", "context", "cot", "choices", "solution", "input", "problem", "final_answer"]
)
def test_a_missing_value_is_missing_and_no_word(kind, field, tmp_path):
    question = "instruction" if field == "input" else "question"
    for nothing in NOTHING[kind]:
        records = [{question: "Q?", "answer": "5", field: nothing}] * 2
        assert load_problems(_source(tmp_path, kind, records)) == (Problem("Q?", (), "5"),) * 2


@pytest.mark.parametrize("kind", NOTHING)
def test_a_missing_question_or_answer_is_said(kind, tmp_path, warnings):
    for nothing in NOTHING[kind]:
        records = [{"problem": "P?", "answer": "5"}, {"problem": nothing, "answer": "5"}]
        with pytest.raises(UserError, match=r"(line|row|record) [23]: the question is empty; give its text or remove"):
            load_problems(_source(tmp_path, kind, records))
        records = [{"problem": "P?", "answer": "5"}, {"problem": "R?", "answer": nothing}]
        problems = load_problems(_source(tmp_path, kind, records))
        assert (problems, problems.left_out) == ((Problem("P?", (), "5"),), 1)
        assert "left out 1 of 2 problems" in warnings[-1]


def test_missing_values_in_lists_chats_and_of_two_layouts(tmp_path):
    nan = float("nan")
    assert load_problems([{"question": "Q?", "steps": ["a", nan, None], "answer": "5"}])[0].steps == ("a",)
    with pytest.raises(UserError, match="record 1: the question is empty"):
        load_problems([{"prompt": [{"role": "user", "content": nan}], "answer": "5"}])
    two = pandas.DataFrame([{"question": "Q?", "answer": 5}, {"problem": "P?", "solution": "So.\n\\boxed{6}"}])
    assert load_problems(two) == (Problem("Q?", (), "5"), Problem("P?", ("So.",), "6"))
    # An answer may be a word.
    (problem,) = load_problems([{"question": "Which of them?", "answer": "None"}], answers="texts")
    assert problem.answer == "None"


def test_an_answer_that_a_table_has_as_a_list_is_no_text(tmp_path):
    for cell in ('["2", "2.0"]', "['yes','no']", "['yes' 'no']", ["2", "2.0"]):
        for field in ("question", "answer"):
            with pytest.raises(UserError, match=f"record 1: field '{field}' is list, not a text; write it as a text$"):
                load_problems([{"question": "Q?", "answer": "5", field: cell}], answers="texts")
    assert load_problems([{"question": "['a'] is?", "answer": "[2, 5]"}], answers="latex")[0].answer == "[2, 5]"


@pytest.mark.parametrize("field", ["steps", "cot", "explanation"])
def test_steps_that_begin_as_a_list_and_are_none_are_a_line(field):
    for cell in ('["a", 3', "['a', b]", "['a'"):
        with pytest.raises(UserError, match=f"^record 1: field '{field}' begins as a list and is none; .*$"):
            load_problems([{"question": "Q?", field: cell, "answer": "5"}])
    assert load_problems([{"question": "Q?", field: "[3+2]*1=5", "answer": "5"}])[0].steps == ("[3+2]*1=5",)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("content", ["5", "#### 5", "Tom has 5.\n\\boxed{5}", None])
def test_the_thought_of_an_assistant_s_message_has_the_steps(name, content):
    told = {"role": "assistant", "content": content, name: "He has 2.\nHe gets 3."}
    user = {"role": "user", "content": "Q?", name: None}
    records = [{"messages": [user, told]}, {"messages": json.dumps([user, told])}]
    records += [{"prompt": [user], "completion": [told]}] * bool(content)
    for record in records:
        problems = load_problems([record if content else record | {"answer": "5"}])
        assert problems == (Problem("Q?", SOLVED.steps, "5"),)


def test_contents_in_parts_and_chats_in_a_dict_are_chats():
    parts = [{"role": each["role"], "content": [{"type": "text", "text": each["content"]}]} for each in (ASKED, TOLD)]
    for messages in (parts, {"messages": [ASKED, TOLD]}, {"messages": parts}, {"conversations": SHARED}):
        for cell in (messages, json.dumps(messages), str(messages)):
            assert load_problems([{"messages": cell}]) == (SOLVED,)
    assert load_problems([{"prompt": {"messages": parts[:1]}, "answer": "5"}]) == (Problem(SOLVED.question, (), "5"),)
    pictures = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, TOLD]
    with pytest.raises(UserError, match="field 'messages' is no chat"):
        load_problems([{"messages": pictures}])


def test_an_answer_beside_a_chat_without_a_mark_is_taken():
    plain, steps = TOLD | {"content": "He has 2.\nHe gets 3."}, ("He has 2.", "He gets 3.")
    for field in ("answer", "final_answer", "ground_truth"):
        for record in ({"messages": [ASKED, plain]}, {"query": SOLVED.question, "response": plain["content"]}):
            problems = load_problems([record | {field: "5"}])
            assert problems == (Problem(SOLVED.question, steps, "5"),)
            assert f"answer from {field}; steps from {[*record][-1]}" in problems.reading.lines()[0]
    assert load_problems([{"messages": [ASKED], "answer": "5"}]) == (Problem(SOLVED.question, (), "5"),)
    assert load_problems([{"messages": [ASKED, TOLD], "answer": "6"}]) == (SOLVED,)  # what is marked comes first
    with pytest.raises(UserError, match="no answer"):  # a label says whether the completion is good
        load_problems([{"prompt": "Q?", "completion": "Words.", "label": True}], answers="texts")


def test_a_named_field_without_steps_is_a_line(tmp_path):
    path = tmp_path / "set.csv"
    path.write_text("question,answer,id,cot\nQ?,5,1,3+2=5\nR?,5,2,4+1=5\n")
    for source, where in ((str(path), f"{path}, line 2"), (pandas.read_csv(path, dtype=str), "record 1")):
        with pytest.raises(UserError, match=rf"^{where}: field 'id' \(config.data.fields.steps\) has no steps"):
            load_problems(source, fields=FieldsConfig(steps="id"))
        assert load_problems(source, fields=FieldsConfig(steps="cot"))[1].steps == ("4+1=5",)
