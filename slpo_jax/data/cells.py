"""What stands in a cell of a record: a text, nothing, or a list, dict or chat, also where a table has it as a text."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from slpo_jax.errors import UserError

# Fields that may be chats; the last two are nothing else.
CHATS = ("prompt", "completion", "messages", "conversations")
_ALWAYS = CHATS[2:]
_TEXT_PART = "text"  # of a content in parts
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # of an assistant's message
_ROLES = {"human": "user", "gpt": "assistant"}  # of `conversations`
# What missing values become in tables: as numbers, and in words, which an answer or a choice may be as well.
_NOT_A_NUMBER = ("nan", "-nan", "<na>", "nat")
_NOTHING = (*_NOT_A_NUMBER, "", "none", "null", "na", "n/a", "#n/a")

_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
# Python's and numpy's way to write what a cell holds: numpy has array(..) around lists, and may have no commas.
_PIECE = re.compile(
    rf"(?P<item>{_QUOTED}|[\]}}]|-?[0-9][0-9.e+-]*)(?P<gap>\s+(?=['\"\[{{0-9-]))?"
    r"|(?P<array>\barray\()|(?P<dtype>,\s*dtype=(?:'[^']*'|\w+))|(?P<nan>\bnan\b)",
    re.DOTALL,
)
_INSTEAD = {"array": "(", "dtype": "", "nan": "None"}
_LIST = re.compile(r"\s*(?:array\()?\[\s*['\"]")  # of texts: [2, 5] may be an interval
_CHAT = re.compile(r"\s*(?:array\()?[\"\[\s]*\{.*?['\"](?:role|from)\\?['\"]\s*:", re.DOTALL)


def is_missing(value: Any, words: bool = True) -> bool:
    """Whether a cell holds nothing.

    Args:
        value: what stands there.
        words: whether "None", "NULL" and their like, and an empty text, are nothing too.
    """
    if isinstance(value, str):
        return len(value) < 20 and value.strip().lower() in (_NOTHING if words else _NOT_A_NUMBER)
    return value is None


def written(text: str) -> list[Any] | dict[str, Any] | None:
    """The list or dict that a text writes, as JSON, Python or numpy do; None for another text.

    Its numbers stay texts, as they are written in JSON.
    """
    text = text.strip()
    if not text.startswith(("[", "{", "array(")):
        return None
    try:
        value = json.loads(text, parse_int=str, parse_float=str, parse_constant=lambda _: None)
    except (json.JSONDecodeError, RecursionError):
        try:
            value = _in_texts(ast.literal_eval(_PIECE.sub(_as_python, text)))
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return None
    return value if isinstance(value, list | dict) else None


def _as_python(piece: re.Match[str]) -> str:
    kind = piece.lastgroup or "item"
    return _INSTEAD[kind] if kind in _INSTEAD else piece["item"] + (", " if piece["gap"] else "")


def _in_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _in_texts(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_in_texts(inner) for inner in value]
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def said(where: str, record: Mapping[str, Any], field: str, role: str, chat: bool = False, needed: bool = True) -> str:
    """A text, or of a chat the one message of a role; of other roles (system, tool) nothing is taken.

    Of an assistant's message the thought comes first, in <think>.

    Args:
        where: the record, for messages.
        record: with the field, which may be missing.
        field: its name.
        role: "user" or "assistant".
        chat: whether it has to be a chat, as a text would be question and answer at once.
        needed: whether a chat has to have such a message.
    Returns:
        the text, "" for a missing one.
    Raises:
        UserError: it is neither, or something that is written like a chat and is none.
    """
    value, chat = _unwrapped(record[field]), chat or field in _ALWAYS
    if isinstance(value, str) and (chat or _CHAT.match(value)):
        found = _unwrapped(written(value))
        value = [found] if isinstance(found, dict) else found if found and isinstance(found[0], dict) else [value]
    elif not isinstance(value, list) or not (field in CHATS or any(isinstance(each, Mapping) for each in value)):
        as_list = written(value) if isinstance(value, str) and _LIST.match(value) else None
        return text_of(where, {field: value if as_list is None else as_list}, field)
    messages = [_message(each) for each in value]
    if not all(isinstance(text, str) or text is None for _, text in messages) or (None, None) in messages:
        raise UserError(
            f'{where}: field \'{field}\' is no chat; write [{{"role": "{role}", "content": TEXT}}]'
            + " or a text" * (not chat)
        )
    texts = [text for by, text in messages if by in (role, None)]
    if not texts and not needed:
        return ""
    if len(texts) != 1:
        raise UserError(
            f"{where}: field '{field}' has {len(texts)} messages of the role {role}, not one; give one problem a record"
        )
    return "" if is_missing(texts[0], words=False) else texts[0]


def _message(each: Any) -> tuple[str | None, Any]:
    """Who says what, in one of the two usual forms; None, None for what is no message."""
    if not isinstance(each, Mapping):
        return None, None
    by, text = each.get("role", each.get("from")), _parts(each.get("content", each.get("value")))
    by = _ROLES.get(by, by)
    thoughts = [_parts(each.get(name)) for name in _THOUGHTS] if by == "assistant" else []
    thought = next((each for each in thoughts if isinstance(each, str) and not is_missing(each)), None)
    if thought is not None and (text is None or isinstance(text, str)):
        text = f"<think>{thought}</think>\n{text or ''}"
    return by, text


def _unwrapped(value: Any) -> Any:
    """The chat of {"messages": CHAT}."""
    inside = [value.get(name) for name in _ALWAYS] if isinstance(value, Mapping) else []
    return next((each for each in inside if isinstance(each, list)), value)


def _parts(content: Any) -> Any:
    """The text of a content that has it in parts; another content as it is."""
    if not isinstance(content, list) or not all(isinstance(each, Mapping) for each in content):
        return content
    texts = [each.get(_TEXT_PART) if each.get("type") == _TEXT_PART else None for each in content]
    return "\n".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else content


def text_of(where: str, record: Mapping[str, Any], field: str) -> str:
    """The text of a field, "" where it is missing.

    Raises:
        UserError: it is something else, or a chat.
    """
    value = record[field]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: field '{field}' is {type(value).__name__}, not a text; write it as a text")
    if _CHAT.match(value):
        raise UserError(f"{where}: field '{field}' is a chat, not a text; write its text alone")
    return value


def listed(where: str, record: Mapping[str, Any], field: str) -> list[Any] | str:
    """The list that a field's text writes, as tables of texts have it, or the text.

    Raises:
        UserError: it begins as a list of texts and is none, or is a chat.
    """
    text = text_of(where, record, field)
    found = written(text)
    if found is None and _LIST.match(text):
        raise UserError(f"{where}: field '{field}' begins as a list and is none; mend it, or write a text")
    return found if isinstance(found, list) else text
