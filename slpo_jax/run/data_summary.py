"""What was understood of the data, in lines: how many problems, their steps, and how the model sees one."""

from collections.abc import Iterable, Sequence

from slpo_jax.config.config import Config
from slpo_jax.data.batches import EncodedProblems
from slpo_jax.data.problem import Problem, Problems
from slpo_jax.rewards.answers import STYLES
from slpo_jax.rewards.reward import CORRECT

_MOST = 160  # characters that are shown of a text that the model sees
_WHOLE = 1000  # and of a line of a problem
_SHOWN = 3  # reasons


def data_summary(config: Config, key: str, problems: EncodedProblems) -> list[str]:
    """One line, and others on the source's fields and, of training data, with an example.

    Args:
        key: "config.data.train", ".valid" or ".eval.NAME".
        problems: the set.
    """
    trains = key == "config.data.train"
    said = _counted(problems.problems) if trains else [f"{len(problems):,} problems"]
    answers = STYLES[problems.template.answer_style].about
    said.append(f"answers are {answers}" if config.reward == CORRECT else f"answers are judged by {config.reward}")
    lines = _lines(key, said, problems)
    return [*lines, f"  the first: {example(problems)}"] if trains else lines


def read_as(source: str, problems: Problems, answers: str) -> list[str]:
    """How a source was read, where no model is at hand.

    Args:
        source: what it is called.
        answers: what its answers are.
    """
    lines = _lines(source, [*_counted(problems), f"answers are {answers}"], problems)
    if problems.left_out:
        lines.append(f"  left out: {problems.left_out:,} of {len(problems) + problems.left_out:,}")
        lines += [f"    {why}" for why in problems.why[:_SHOWN]]
    return lines


def problem_lines(problems: Iterable[Problem]) -> list[str]:
    """Problems as prompt, steps and answer."""
    lines = []
    for number, problem in enumerate(problems, start=1):
        parts = {"prompt": problem.question.split("\n"), "steps": problem.steps or ["none"], "answer": [problem.answer]}
        for name, texts in parts.items():
            heads = [f"{number if name == 'prompt' else '':>3}  {name:<6}"] + [" " * 11] * (len(texts) - 1)
            lines += [f"{head}  {_shortened(text, _WHOLE)}" for head, text in zip(heads, texts, strict=True)]
    return lines


def _counted(problems: Sequence[Problem]) -> list[str]:
    counts = [len(problem.steps) for problem in problems]
    said = [f"{len(counts):,} problems", f"{sum(counts) / len(counts):.1f} steps each"]
    return said + [f"{counts.count(0):,} without steps"] * (0 in counts)


def _lines(name: str, said: list[str], problems: EncodedProblems | Problems) -> list[str]:
    """What is said of a set in a line, and others on its fields."""
    return [f"{name}: {', '.join(said)}", *(f"  {line}" for line in problems.reading.lines())]


def example(problems: EncodedProblems, index: int = 0) -> str:
    """A problem as the model sees it: prompt | steps | answer, as its template writes them."""
    template, problem = problems.template, problems.problems[index]
    steps = "".join(template.step_text(step, place == 0) for place, step in enumerate(problem.steps))
    texts = (template.question_text(problem.question), steps, template.answer_text(problem.answer))
    return " | ".join(_shortened(repr(text)) for text in texts)


def _shortened(text: str, most: int = _MOST) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} .. {text[-most // 2 :]}"
