"""What the texts of records say: the answer of a worked solution, and its steps."""

import re
from collections.abc import Sequence
from typing import Any

from slpo_jax.data.cells import is_missing
from slpo_jax.errors import UserError
from slpo_jax.rewards.answers import last_boxed

_ANNOTATION = re.compile(r"<<.*?>>", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Ms\.)(?<!Dr\.)\s+")
# The last line of MetaMathQA, and of many chats.
_ANSWER_IS = re.compile(
    r"(.*)\b(?:the (?:final )?answer is:?|(?:final )?answer:)[\s*]*(.+?)[\s*]*\.?\s*", re.IGNORECASE
)
_BOX_ALONE = re.compile(r"\W*\\boxed\{.*\}\W*")  # a last line that is no step
_TAG = re.compile(r"</?(?:think|answer)>", re.IGNORECASE)
_BEHIND = re.compile(r"(.*)<answer>(.*?)(?:</answer>.*)?", re.DOTALL | re.IGNORECASE)
_BEHIND_THOUGHT = re.compile(r"(.*)</think>(.*)", re.DOTALL | re.IGNORECASE)


def marked(text: str) -> tuple[str, str | None]:
    r"""A solution without the mark behind which its answer stands, and the answer, None without one.

    The mark is the tag <answer>, or else the end of a thought, </think>, or else the last "####", or else the last
    \boxed{}, or else "the answer is" or "answer:" of the last line.
    """
    found = _BEHIND.fullmatch(text) or _BEHIND_THOUGHT.fullmatch(text)
    solution, behind = found.groups() if found else (text, "")
    solution = without_tags(solution)
    if not behind.strip() or not solution.strip():
        return _marked(solution if solution.strip() else behind)
    return _marked(solution)[0], _marked(behind)[1] or behind.strip()


def without_tags(text: str) -> str:
    """A text without <think> and its like, in whose places lines end."""
    return _TAG.sub("\n", text)


def _marked(text: str) -> tuple[str, str | None]:
    """`marked` of a text without tags."""
    before, hashes, after = text.rpartition("####")
    if hashes:
        return before, after.strip().partition("\n")[0].strip()
    lines, _, last = text.rstrip().rpartition("\n")
    said, boxed = _ANSWER_IS.fullmatch(last), last_boxed(text)
    if said:
        sentences = _SENTENCE_END.split(said[1].rstrip("*"))
        kept = sentences[:-1] or sentences * (not lines and "=" in said[1])
        return "\n".join([lines, " ".join(kept).strip()]).strip("\n"), boxed or said[2]
    if boxed:
        return lines if _BOX_ALONE.fullmatch(last) else text, boxed
    return text, None


def steps_of(steps: list[Any]) -> list[Any]:
    """The steps of a list: none has tags, and none is missing or the answer; an empty one stays, as COCONUT has it."""
    texts = [without_tags(step).strip("\n") if isinstance(step, str) else step for step in steps]
    return [step for step in texts if step == "" or not (is_missing(step) or _is_answer(step))]


def _is_answer(step: Any) -> bool:
    """Whether a step is a marked answer and nothing else."""
    solution, answer = marked(step) if isinstance(step, str) else (step, None)
    return answer is not None and not solution.strip()


def written_steps(found: Sequence[tuple[str, tuple[str, ...], str]]) -> list[tuple[str, ...]]:
    """The steps of a set's problems, all found in one way.

    Where at least half of the solutions have annotations, as GSM8K's, those are the steps, and nothing between them is.
    Otherwise a line is a step; of a solution that is one line, a sentence, or what semicolons part.

    Args:
        found: where each problem is, its steps where they are listed, and else its solution.
    Returns:
        the steps of each.
    Raises:
        UserError: an annotation isn't closed.
    """
    texts = [solution for _, _, solution in found if solution.strip()]
    annotated = 2 * sum("<<" in text for text in texts) >= len(texts)
    read = _annotations if annotated else _lines
    return [listed or read(where, solution) for where, listed, solution in found]


def _annotations(where: str, text: str) -> tuple[str, ...]:
    if "<<" in _ANNOTATION.sub("", text):
        raise UserError(f"{where}: a step opens with << and is not closed; write <<1+2=3>>")
    return tuple(_ANNOTATION.findall(text))


def _lines(_: str, text: str) -> tuple[str, ...]:
    lines = [line.strip() for line in _ANNOTATION.sub("", text).split("\n") if line.strip()]
    if len(lines) == 1:
        lines = _SENTENCE_END.split(lines[0])
    return tuple(re.split(r";\s+", lines[0]) if len(lines) == 1 else lines)
