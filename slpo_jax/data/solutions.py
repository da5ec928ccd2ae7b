"""What the texts of records say: the answer of a worked solution, its steps, and the number in `15 books`."""

import re
from collections.abc import Sequence
from typing import Any

from slpo_jax.data.cells import is_missing
from slpo_jax.errors import UserError
from slpo_jax.rewards.answers import canonical_number, last_boxed

_ANNOTATION = re.compile(r"<<.*?>>", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Ms\.)(?<!Dr\.)\s+")
# The last line of MetaMathQA, and of many chats.
_ANSWER_IS = re.compile(
    r"(.*)\b(?:the (?:final )?answer is:?|(?:final )?answer:)\s*([^\n]+?)\.?\s*", re.DOTALL | re.IGNORECASE
)
# What is left of a line that says the answer, where that is cut off.
_ANNOUNCED = re.compile(
    r"[\s,;]*(?:(?<!\w)(?:so|thus|hence|therefore|and|or|then|which)\b,?\s*)*"
    r"(?:(?<!\w)(?:(?:it|this|that|we|(?:the )?(?:final )?(?:answer|result))\s+)?(?:is|are|get|have|makes|equals)\b"
    r"|(?<!\w)(?:the )?(?:final )?answer\b)?[\s,;:=$*(\[\\]*\Z",
    re.IGNORECASE,
)
_BOX_ALONE = re.compile(r"(.*\n)\s*\$*\\boxed\{[^\n]*\}\$*\.?\s*", re.DOTALL)  # a last line that is no step
# What chats have around a thought, and around its answer.
_THOUGHT = "think|thinking|thoughts?|reason|reasoning|analysis|scratchpad"
_SPEAKER = r"(?:<\|start\|>assistant)?<\|channel\|>"
_AS_TAGS = (  # <seed:think>, [THINK], ◁think▷, and gpt-oss's channels
    (re.compile(rf"[<\[◁](/?)(?:seed:)?(?:{_THOUGHT})[>\]▷]", re.IGNORECASE), r"<\1think>"),
    (re.compile(rf"<\|begin_of_thought\|>|{_SPEAKER}(?:analysis|commentary)[^<]*<\|message\|>"), "<think>"),
    (re.compile(r"<\|end_of_thought\|>|<\|end\|>(?=\s*\S)"), "</think>"),
    (re.compile(rf"{_SPEAKER}final[^<]*<\|message\|>|<\|start\|>assistant|<\|(?:end|return)\|>"), "\n"),
)
_ANSWER_TAG = re.compile(r"<(answer|final_answer)>((?:(?!<\1>).)*?)(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_TAG = re.compile(r"</?(?:think|solution|answer|final_answer|step)>|<\|(?:begin|end)_of_solution\|>", re.IGNORECASE)
# **Answer:** 6; **Final Answer**; **The answer is 6.**; ### Answer
_ANSWER_HEADING = re.compile(
    r"(?<![\w*#])(?:\#{1,6}[ \t]*)?\*\*[ \t]*(?:the )?(?:final |correct )?answer(?P<is>[ \t]+is)?[ \t]*"
    r"(?:(?P<closed>:[ \t]*\*\*|\*\*[ \t]*:?)|:|(?(is)(?=\S)|(?!)))"
    r"|^[ \t]*\#{1,6}[ \t]*(?:the )?(?:final |correct )?answer[ \t]*(?P<line>:|$)",
    re.IGNORECASE | re.MULTILINE,
)
# A line that is a heading and no more, and what a line may begin with.
_HEADING = re.compile(
    r"(?=\#{1,3}[ \t]|\*\*.*[^.!?*]\*\*:?\Z)(?=.*[a-z])(?:\#{1,3}[ \t]+)?(?:\*\*)?[ \t]*(?:(?:step|part) ?)?"
    r"(?:\d+[.):]?)?[^\d=*]*(?:\*\*)?:?",
    re.IGNORECASE,
)
_HEADED = re.compile(
    r"\*\*[ \t]*(?:solution|explanation|reasoning|rationale|analysis|thought|(?:step|part) ?\d+)[ \t]*"
    r"(?::[ \t]*\*\*|\*\*[ \t]*:)[ \t]*",
    re.IGNORECASE,
)
_IN_BOLD = re.compile(r"(?<![\w)])\*\*(\S(?:.*?\S)?)\*\*(?!\w)")
# Beside a number that is the answer. Of one letter that touches it, nobody knows whether it is a unit ("2x", "5k").
_CURRENCY = r"(?:\\?\$|[€£¥₹]|US\$|USD |EUR |Rs\.? ?)"
_UNIT = r"(?: ?(?:%|°[CF]?)| [^\W\d_]{1,20}| ?[^\W\d_]{2,20}(?:[/ ][^\W\d_]{1,20}){0,3}| ?[€£¥])"
_MEASURED = re.compile(rf"(-?) ?({_CURRENCY})? ?(-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+)({_UNIT})?\.?")
# Words behind which the number is another one, or isn't known, and products of letters.
_NO_UNIT = re.compile(
    r"\b(hundred|thousand|milli(on|ard)\w*|billion|trillion|dozen|gross|score|lakh|lac|crore|[bmt]n|[bm]ln|mio|mrd|"
    r"half|halves|quarter|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|(hundred|thousand)th|"
    r"st|nd|rd|th|k|or|and|to|than|point|mod|plus|minus|times|over|pi|sqrt|squared|cubed|below|zero|[xyz]+)s?\b|π",
    re.IGNORECASE,
)
# A Latin or Greek letter by itself is a variable or a multiplier (3 x, 2 M), unless units are written so.
_LETTER = re.compile(r" [A-Za-zα-ωΑ-Ψ](?<![mghsdlLJNVWACF])(?![^\W\d_])")


def measured_number(text: str) -> str | None:
    """The canonical decimal of a number with its unit or currency: 15 of "15 books" and of "$15.00"; else None."""
    match = _MEASURED.fullmatch(" ".join(text.split()))
    if match is None:
        return None
    unit = match[4] or ""
    # \w takes ½ and 万 for letters; a power is behind one.
    counts = any(letter.isnumeric() for letter in re.sub(r"(?<=[^\W\d_])[²³]", "", unit))
    return None if counts or _NO_UNIT.search(unit) or _LETTER.match(unit) else canonical_number(match[1] + match[3])


def marked(text: str) -> tuple[str, str | None]:
    r"""A solution, without the mark behind which its answer stands if it can be cut, and the answer, None without one.

    The mark is the tag <answer>, or else the end of a thought, </think>, or else a heading, `**Answer:**`, or else the
    last "####", or else the last \boxed{}, or else "the answer is" or "answer:" of the last line. MetaMathQA has a line
    of that kind behind "####" or a box.
    """
    text = _in_tags(text)
    solution, behind = _tagged(text) if _TAG.search(text) else (text, "")
    solution, under = _headed(solution)
    solution, said = _marked(solution)
    if behind := behind or under:
        inner, under = _headed(behind)
        said = _marked(under or inner)[1] or (under or inner).strip()
    return solution, said and _IN_BOLD.sub(r"\1", said)


def without_tags(text: str) -> str:
    """A text without <think> and its like, in whose places lines end."""
    return _TAG.sub("\n", _in_tags(text))


def steps_of(steps: list[Any]) -> list[Any]:
    """The steps of a list: none has tags, and none is missing or the answer; an empty one stays, as COCONUT has it."""
    texts, mark = list[Any](), ""
    for step in steps:
        if isinstance(step, str):
            step, mark = mark + step, ""
            if _opens_answer(step):
                mark, step = f"{step}\n", None
            elif _is_answer(step):
                step = None
            elif without_tags(step) != step:
                step = without_tags(step).strip() or None
        texts.append(step)
    return [step for step in texts if step == "" or not is_missing(step)]


def _is_answer(text: str) -> bool:
    """Whether a text is a marked answer and nothing else."""
    solution, answer = marked(text)
    return answer is not None and not solution.strip()


def _opens_answer(text: str) -> bool:
    """Whether a text is a mark and nothing else, so that what follows is the answer."""
    text = text.strip()
    return text.lower() in ("<answer>", "<final_answer>") or bool(_ANSWER_HEADING.fullmatch(text))


def _in_tags(text: str) -> str:
    for pattern, tag in _AS_TAGS if any(sign in text for sign in "<[◁") else ():  # a `Rounded` stays one
        text = pattern.sub(tag, text)
    return text


def _tagged(text: str) -> tuple[str, str]:
    """A solution without tags, and what stands behind the thought or in the answer's tag, "" for nothing."""
    *_, last = (None, *_ANSWER_TAG.finditer(text))
    before, behind = (text[: last.start()] + text[last.end() :], last[2]) if last else (text, "")
    thought, end, rest = before.rpartition("</think>")
    thought, rest = (thought, rest) if end else (before, "")
    thought, rest, behind = (without_tags(part).strip() for part in (thought, rest, behind))
    return (thought, behind or rest) if thought else (rest, behind)


def _headed(text: str) -> tuple[str, str]:
    """A solution without the last heading of an answer, and that answer, "" where there is none."""
    found = list(_ANSWER_HEADING.finditer(text)) if "answer" in text.lower() else []
    if not found:
        return text, ""
    last = found[-1]
    before, after = text[: last.start()], text[last.end() :].strip()
    if last["closed"] is None and last["line"] is None:  # the answer is bold as well
        after = after.partition("**")[0]
    line, _, rest = after.partition("\n")
    if before.strip():
        return before, after if _marked(after)[1] else line
    if not line:
        return text, ""
    return rest, "" if _marked(rest)[1] else line


def _marked(text: str) -> tuple[str, str | None]:
    """`marked` of a text without tags and headings."""
    before, hashes, after = text.rpartition("####")
    said = _ANSWER_IS.fullmatch(text) if "answer" in text.lower() else None  # which takes its time
    boxed = last_boxed(text)
    in_one_line = "\n" not in text.strip()
    if hashes:
        solution, answer = before, said[2] if said and "####" not in said[2] else after.strip()
    else:
        # Of the last of several lines less than a sentence can't be cut out.
        can_cut = said and (in_one_line or re.fullmatch(r"(.*[.!?\n])?\s*", said[1], re.DOTALL))
        solution, answer = said[1] if said and can_cut else text, boxed or (said[2] if said else None)
        if boxed and solution == text and (alone := _BOX_ALONE.fullmatch(text)):
            solution = alone[1]
    if in_one_line and answer is not None:
        while boxed and last_boxed(solution) == boxed:
            solution = solution.rpartition("\\boxed")[0]
        solution = _ANNOUNCED.sub("", solution, count=1)
    return solution, answer


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
    lines = [line.strip() for line in _ANNOTATION.sub("", text).split("\n")]
    lines = [_HEADED.sub("", line, count=1) for line in lines if line and not _HEADING.fullmatch(line)]
    if len(lines) == 1:
        lines = _SENTENCE_END.split(lines[0])
    return tuple(re.split(r";\s+", lines[0]) if len(lines) == 1 else lines)
