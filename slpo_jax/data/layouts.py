"""The field names of published data sets: the one table by which records are read.

To have a further layout read, add its names here. A user names the fields of a single set with `config.data.fields`.
"""

import re
from typing import Any

FIELD_NAMES: dict[str, dict[str, str]] = {
    "question": {
        "question_concat": "SVAMP, of Body and Question",
        "question": "GSM8K, COCONUT's files, ARC, GPQA",
        "problem": "MATH, DeepMath, OpenMathInstruct",
        "query": "MetaMathQA",
        "instruction": "Alpaca, MathInstruct",
        "input": "gsm-hard",
        "prompt": "TRL, DAPO",
        "question_stem": "OpenBookQA",
        "messages": "TRL and chats",
        "conversations": "ShareGPT",
    },
    "answer": {
        "answer": "GSM8K, COCONUT's files, MATH-500",
        "final_answer": "DeepMath",
        "final_ans": "MultiArith",
        "expected_answer": "OpenMathInstruct",
        "answerkey": "ARC, OpenBookQA, CommonsenseQA",
        "correct answer": "GPQA",
        "correct_answer": "SciQ, OpenTDB",
        "correct_option": "sets with choices",
        "correct": "AQuA",
        "answer_idx": "MedQA",
        "cop": "MedMCQA",
        "target": "gsm-hard",
        "ground_truth": "sets for verifiers",
        "reward_model": "DAPO, verl",
        "solution": "MATH",
        "response": "MetaMathQA",
        "output": "Alpaca, MathInstruct",
        "completion": "TRL",
        "messages": "TRL and chats",
        "conversations": "ShareGPT",
        "label": "HellaSwag, PIQA, COPA",
    },
    "steps": {
        "steps": "COCONUT's files, gsm8k-aug",
        "cot": "GSM8k-Aug",
        "rationale": "AQuA",
        "reasoning": "reasoning traces",
        "chain_of_thought": "reasoning traces",
        "explanation": "ECQA",
        "thought": "reasoning traces",
    },
    "choices": {
        "choices": "MMLU, ARC, CommonsenseQA",
        "options": "AQuA, MedQA",
        "endings": "HellaSwag",
    },
}
"""By what a field holds: its names in lower case and sets that have it so. The first one that is filled is taken."""

CHATS = ("messages", "conversations")
"""Fields that must be chats; others may be."""

WORKED_SOLUTIONS = ("solution", "response", "output", "completion", *CHATS)
"""Fields with steps, in which the answer stands behind a mark."""

ANSWERS_ALONE = {*FIELD_NAMES["answer"]} - {"answer", *WORKED_SOLUTIONS}
"""Fields that never hold steps, so that several lines are the answer too."""

STEPS_ALONE = ("steps", "cot", "rationale")
"""Fields that must hold steps; the others of that row may be anything."""

VERIFIER_TARGETS = ("target", "label")
"""Fields that may be what a reward goes by, such as the goal of a number puzzle, instead of an answer."""

BEFORE_QUESTION = {"question": ("context", "passage", "body")}
AFTER_QUESTION = {"instruction": ("input",)}
"""Parts of the question that stand before or after the field of this name."""

RIGHT_ANSWERS = ("correct answer", "correct_answer")
WRONG_ANSWERS = (
    ("incorrect answer 1", "incorrect answer 2", "incorrect answer 3"),
    ("distractor1", "distractor2", "distractor3"),
    ("incorrect_answers",),
)
"""Wrong answers beside one of `RIGHT_ANSWERS`: GPQA's, SciQ's and OpenTDB's."""

CHOICE_COLUMNS = {
    "op": 0,  # MedMCQA
    "opt": 0,
    "option": None,  # WinoGrande, whose answers are the numbers in the names
    "choice": 0,  # COPA
    "ending": 0,  # SWAG
    "sol": 0,  # PIQA
    "answer": 1,  # Social IQa
}
"""Names of columns with a choice each, before a letter or a number, and the first index that their sets count from.

None stands for the lowest number in the names.
"""

_COLUMN = re.compile(
    r"(?P<letter>[A-Z])"
    r"|(?:(?P<name>(?i:op|opt|option|choice|ending|sol))(?![sS]\Z)[ _-]?|(?P<answer>answer)(?=[A-Z]))"
    r"(?:(?P<suffix>[A-Za-z])|(?P<number>\d{1,2}))"
)

_KNOWN_NAMES = {
    *FIELD_NAMES["question"],
    *FIELD_NAMES["answer"],
    *FIELD_NAMES["steps"],
    *FIELD_NAMES["choices"],
    *BEFORE_QUESTION["question"],
    *AFTER_QUESTION["instruction"],
}
for _names in WRONG_ANSWERS:
    _KNOWN_NAMES.update(_names)


def match_choice_column(name: Any) -> re.Match[str] | None:
    """Match the name of a column that may hold one choice: A; option_a; opa; option1; ending0; answerA."""
    return _COLUMN.fullmatch(str(name).strip())


def is_known(name: str) -> bool:
    """Tell whether a field would be read as a part of the problem, rather than kept as a column beside it."""
    is_field = name.strip().lower() in _KNOWN_NAMES
    return is_field or match_choice_column(name) is not None
