"""Tags and headings of chats: their answers are read, and neither they nor the line with the answer is a step."""

import pytest

from slpo_jax.data.problem import Problem
from slpo_jax.data.problems import load_problems
from slpo_jax.data.solutions import marked, without_tags

LINES, STEPS = "He has 20.\nHe gets 20.", ("He has 20.", "He gets 20.")
ONE = LINES.replace("\n", " ")
ANSWERED = {
    "a thought": f"<think>\n{LINES}\n</think>\n\\boxed{{40}}",
    "a thought in one line": f"<think> {ONE} </think> So it is \\boxed{{40}}.",
    "one that the prompt opens": f"{LINES}\n</think>\n\nThe answer is \\boxed{{40}}.",
    "a thought with its own answer": f"<think>{LINES}\nThe answer is 40.</think>The answer is 40.",
    "a thought and a bare answer": f"<Think>{LINES}</Think>\n40",
    "an empty thought": f"<think>\n\n</think>\n\n{LINES}\n#### 40",
    "a thought that has no end": f"<think>\n{LINES}\n#### 40",
    "two thoughts": f"<think>{STEPS[0]}</think>\n<think>{STEPS[1]}</think>\n#### 40",
    "reasoning and answer": f"<reasoning>\n{LINES}\n</reasoning>\n<answer>\n40\n</answer>\n",
    "answer in one line": f"{ONE} <answer>40</answer>",
    "answer that has no end": f"<think>{LINES}</think><answer> \\boxed{{40}}",
    "a thought, words, and an answer": f"<think>{LINES}</think>\nWe are done.\n<answer>The answer is 40.</answer>",
    "an answer, then a solution": f"<answer>40</answer>\n<reasoning>{LINES}</reasoning>",
    "Open-Thoughts": f"<|begin_of_thought|>\n{LINES}\n<|end_of_thought|>\n\n<|begin_of_solution|>\nSo \\boxed{{40}}\n"
    "<|end_of_solution|>",
    "a bold heading": f"{LINES}\n**Answer:** 40",
    "the colon behind it": f"{LINES}\n**Answer**: 40",
    "all of it bold": f"{LINES}\n**Answer: 40**",
    "a bold sentence": f"{LINES}\n**The answer is 40.**",
    "a bold number": f"{LINES}\nThe answer is **40**.",
    "a bold number after hashes": f"{LINES}\n#### **40**",
    "in one line": f"{ONE} **Answer:** **40**",
    "a box": f"{LINES}\n\n**Final Answer**: \\boxed{{40}}",
    "a box below": f"{LINES}\n\n**Final Answer**\n\n$$\n\\boxed{{40}}\n$$\n",
    "a heading": f"{LINES}\n### Answer\n40\n",
    "a heading in bold": f"{LINES}\n## **Final answer:**\n40\n",
    "headings all over": f"**Solution:**\n### Step 1: Begin\n{STEPS[0]}\n**Step 2: Go on**\n{STEPS[1]}\n### Answer: 40",
    "headings before sentences": f"**Solution:** {STEPS[0]}\n**Step 2**: {STEPS[1]}\n**Answer:** 40",
    "the answer first": f"**Answer:** 40\n**Explanation:**\n{LINES}",
    "the answer first and last": f"**Answer:** 40 in all, for:\n{LINES}\n#### 40",
    "a tag within a thought": f"<think>\n{LINES}\n</think>I put it in <answer> tags.\n<answer>40</answer>",
    "both": f"<think>\n**Analysis**\n{LINES}\n</think>\n**Final Answer:** \\boxed{{40}}",
}


@pytest.mark.parametrize("name", ANSWERED)
def test_tags_and_headings_are_no_steps_and_the_answer_behind_them_is_read(name):
    solution = ANSWERED[name]
    chat = [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": solution}]
    for record in ({"messages": chat}, {"question": "Q?", "answer": solution}, {"problem": "Q?", "solution": solution}):
        for answers in ("numbers", "latex", "texts"):
            assert load_problems([record], answers=answers) == (Problem("Q?", STEPS, "40"),), record
    for field in ("cot", "reasoning", "solution"):
        assert load_problems([{"question": "Q?", field: solution, "answer": "40"}])[0].steps == STEPS


def test_listed_steps_have_no_tags():
    steps = ["<think>", STEPS[0], f"{STEPS[1]} </think>"]
    assert load_problems([{"question": "Q?", "steps": steps, "answer": "40"}])[0].steps == STEPS
    # COCONUT's files have an empty step where GSM8K has no annotation, and their programs train on it.
    assert load_problems([{"question": "Q?", "steps": [""], "answer": "40"}])[0].steps == ("",)
    assert without_tags("a <b> x<think>y < z") == "a <b> x\ny < z"


def test_texts_behind_a_thought_are_answers():
    solution = "<think>\nTom is a.\n**Every a is a b.**\n</think>\nTom is a b."
    problems = load_problems([{"question": "Is he?", "answer": solution}], answers="texts")
    assert problems == (Problem("Is he?", ("Tom is a.", "**Every a is a b.**"), "Tom is a b."),)
    worked = {"instruction": "Q?", "output": "<think>a</think>\nNo number here.\n#### none"}
    assert load_problems([worked, {"instruction": "R?", "output": "5"}]).left_out == 1


@pytest.mark.parametrize(
    "text", ["2**3**2 = 512.", "Is **a** < b?", "It has __ pens.", "# of pens: 2 + 3 = 5", "**3 + 4 = 7**", "**7**"]
)
def test_what_is_no_heading_stays(text):
    assert marked(text) == (text, None)
    assert load_problems([{"question": "Q?", "solution": f"{text}\nSo.", "answer": "5"}])[0].steps == (text, "So.")


MARKED_ALONE = [
    r"\boxed{5}",
    r"$\boxed{5 m^2}$.",
    "#### 5",
    "**Answer:** 5",
    "<answer>5</answer>",
    "The answer is 5.",
    "$5$",
]


@pytest.mark.parametrize("answer", [*MARKED_ALONE, r"\[\boxed{5}\]", r"So it is \boxed{5}."])
def test_an_answer_that_is_nothing_but_marked_is_no_step(answer):
    for field in ("answer", "solution", "final_answer", "output"):
        for answers in ("latex", "texts"):
            problems = load_problems(
                [{"question": "Q?", field: answer}, {"question": "R?", field: "#### 2"}], answers=answers
            )
            assert [problem.steps for problem in problems[-2:]] == [()] * len(problems), field


@pytest.mark.parametrize(
    "thought",
    [
        "[THINK]3+2=5[/THINK]", "[think]\n3+2=5\n[/think]\n", "◁think▷3+2=5◁/think▷", "<seed:think>3+2=5</seed:think>",
        "<|channel|>analysis<|message|>3+2=5<|end|>",
        "<|channel|>analysis<|message|>3+2=5<|end|><|start|>assistant<|channel|>final<|message|>",
        "3+2=5 ", "3+2=5, so ", "3+2=5, so the answer is ",
    ],
)  # fmt: skip
def test_in_one_line_the_answer_is_cut_off_whatever_stands_before_it(thought):
    answers = [r"\boxed{5}", "#### 5", "The answer is 5.", "**Answer:** 5", r"$\boxed{5}$. The answer is 5."]
    for answer in answers + ["5<|end|>", "5<|return|>"] * ("channel" in thought):
        if (thought.endswith("is ") and "box" not in answer) or (thought.endswith("so ") and "*" in answer):
            continue
        assert load_problems([{"problem": "Q?", "solution": thought + answer}]) == (Problem("Q?", ("3+2=5",), "5"),)
    sentences = r"Is it 2? He gets \boxed{3}. So it is $\boxed{5}$, or five."
    assert marked(sentences) == (r"Is it 2? He gets \boxed{3}.", "5")


@pytest.mark.parametrize(
    "answer", [*([each] for each in MARKED_ALONE[:-1]), ["<answer>", "5", "</answer>"], ["### Answer", "5"]]
)
@pytest.mark.parametrize("thought", [["<think>", "3+2=5", "</think>"], ["[THINK]3+2=5[/THINK]"], ["3+2=5"]])
def test_a_listed_step_that_is_nothing_but_the_answer_is_none(thought, answer):
    for steps in (thought + answer, str(thought + answer)):
        assert load_problems([{"question": "Q?", "steps": steps, "answer": "5"}]) == (Problem("Q?", ("3+2=5",), "5"),)
