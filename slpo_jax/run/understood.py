"""What was understood of the data, in lines: how many problems, their steps, and how the model sees one."""

from slpo_jax.config import Config
from slpo_jax.rewards.answers import AnswerStyle
from slpo_jax.rewards.reward import CORRECT
from slpo_jax.text.batches import EncodedProblems

_ANSWERS: dict[AnswerStyle, str] = {
    "after_mark": "numbers, read after the last #",
    "last_number": "numbers, the last one is read",
    "boxed": r"LaTeX, read from the last \boxed{}",
    "texts": "texts, read after the last mark",
}
_MOST = 160  # characters that are shown of a text


def understood(config: Config, key: str, problems: EncodedProblems) -> list[str]:
    """One line, and others on the source's fields and, of training data, with an example.

    Args:
        key: "config.data.train", ".valid" or ".eval.NAME".
        problems: the set.
    """
    counts, trains = [len(problem.steps) for problem in problems.problems], key == "config.data.train"
    said = [f"{len(counts):,} problems"]
    if trains:
        said.append(f"{sum(counts) / len(counts):.1f} steps each")
        said += [f"{counts.count(0):,} without steps"] * (0 in counts)
    answers = _ANSWERS[problems.template.answer_style]
    said.append(f"answers are {answers}" if config.reward == CORRECT else f"answers are judged by {config.reward}")
    if problems.measured:
        said.append(f"without units and currencies, as that of {problems.measured[0]!r}")
    lines = [f"{key}: {', '.join(said)}", *(f"  {line}" for line in problems.reading.lines())]
    return [*lines, f"  the first: {example(problems)}"] if trains else lines


def example(problems: EncodedProblems, index: int = 0) -> str:
    """A problem as the model sees it: prompt | steps | answer, as its template writes them."""
    template, problem = problems.template, problems.problems[index]
    steps = "".join(template.step_text(step, place == 0) for place, step in enumerate(problem.steps))
    texts = (template.question_text(problem.question), steps, template.answer_text(problem.answer))
    return " | ".join(_shortened(repr(text)) for text in texts)


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[: _MOST // 2]} .. {text[-_MOST // 2 :]}"
