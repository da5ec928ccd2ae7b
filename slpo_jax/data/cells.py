"""What stands in a cell of a record: a text, nothing, or a list, dict or chat, also where a table has it as a text."""

import ast
import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from slpo_jax.errors import UserError

CHATS = ("messages", "conversations")
"""Fields that are chats; others may be."""
_ROLES = {"human": "user", "gpt": "assistant"}  # of `conversations`
_NOTHING = ("", "nan", "-nan", "<na>", "nat", "n/a", "#n/a", "null", "-", "\u2013", "\u2014", "--")
_LIST = re.compile(r"\s*\[\s*['\"]")  # of texts: [2, 5] may be an interval
_SIDE_BY_SIDE = re.compile(r"['\"]\s+['\"]")  # numpy writes no commas, and Python joins such texts


class Number(str):
    """A number that a file or a caller has as one, as it is written: a text for all who don't ask."""

    __slots__ = ()


def plain(value: Any) -> Any:
    """What a reward is given of a cell: numbers as int or float, in lists and dicts too."""
    if isinstance(value, Number):
        return int(Decimal(value)) if value.lstrip("-").isdigit() else float(value)
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def constant(name: str) -> Number | None:
    """JSON's NaN, which is a missing value, and its infinities."""
    return None if name == "NaN" else Number(name)


def is_number(value: Any) -> bool:
    """Whether a cell has a number as one; True and False are none."""
    return isinstance(value, int | Decimal | Number) and not isinstance(value, bool)


def is_missing(value: Any) -> bool:
    """Whether a cell holds nothing; "None" may be an answer or a choice."""
    return value is None or (isinstance(value, str) and value.strip().lower() in _NOTHING)


def written(text: str) -> list[Any] | dict[str, Any] | None:
    """The list or dict that a text writes, as JSON or Python do; None for another text."""
    text = text.strip()
    if not text.startswith(("[", "{")):
        return None
    try:
        return json.loads(text, parse_int=Number, parse_float=Number, parse_constant=constant)
    except (json.JSONDecodeError, RecursionError):
        try:
            return None if _SIDE_BY_SIDE.search(text) else ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return None


def said(where: str, record: Mapping[str, Any], field: str, role: str, needed: bool = True) -> str:
    """A text, or of a chat the one message of a role; of other roles (system, tool) nothing is taken.

    Args:
        where: the record, for messages.
        record: with the field.
        field: its name.
        role: "user" or "assistant".
        needed: whether a chat has to have such a message.
    Returns:
        the text, "" for a missing one.
    Raises:
        UserError: it is neither.
    """
    value = record[field]
    chat = written(value) if isinstance(value, str) else value
    if field not in CHATS and not (isinstance(chat, list) and chat and isinstance(chat[0], Mapping)):
        return text_of(where, record, field)
    messages = chat if isinstance(chat, list) and all(isinstance(each, Mapping) for each in chat) else []
    by = [(each.get("role", each.get("from")), each.get("content", each.get("value"))) for each in messages]
    texts = [text for said_by, text in by if _ROLES.get(said_by, said_by) == role]
    if not texts and messages and not needed:
        return ""
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise UserError(
            f"{where}: field '{field}' is no chat with one message of the role {role}; write "
            f'[{{"role": "{role}", "content": TEXT}}], and a record a problem'
        )
    return texts[0]


def text_of(where: str, record: Mapping[str, Any], field: str) -> str:
    """The text of a field, "" where it is missing.

    Raises:
        UserError: it is something else.
    """
    value = record[field]
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: field '{field}' is {type(value).__name__}, not a text; write it as a text")
    return value or ""


def listed(where: str, record: Mapping[str, Any], field: str) -> list[Any] | str:
    """The list that a field's text writes, as tables of texts have it, or the text.

    Raises:
        UserError: it begins as a list of texts and is none.
    """
    text = text_of(where, record, field)
    found = written(text)
    if found is None and _LIST.match(text):
        raise UserError(f"{where}: field '{field}' begins as a list and is none; mend it, or write a text")
    return found if isinstance(found, list) else text


def only_one(value: Any) -> Any:
    """What stands alone in a list, also in one that a text writes; else the value."""
    found = written(value) if isinstance(value, str) and _LIST.match(value) else value
    return found[0] if isinstance(found, list) and len(found) == 1 and not isinstance(found[0], Mapping) else value
