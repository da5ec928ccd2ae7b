r"""What LaTeX texts say, by their letters: what is boxed, what delimiters hold, a number without its unit, a word."""

import re

from slpo_jax.rewards.texts import normal_text

_BOX = r"\\(?:boxed|fbox|framebox)"
# A box without braces holds what stands before a blank or a sign of LaTeX.
_BOXED = re.compile(_BOX + r"(?:\s*(\{)|(?:\s+(?=[\w.-])|(?=[0-9-]))([^\s{}$\\]+))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped one is a character of the text
_WHITESPACE = " \t\n\r\v\f"
_DELIMITED = re.compile(
    r"\$\$([^$]+)\$\$|\$((?:\\\$|[^$])+)\$|\\\(((?:(?!\\[()]).)+)\\\)|\\\[((?:(?!\\[\[\]]).)+)\\\]|\*\*([^*]+)\*\*|`([^`]+)`",
    re.DOTALL,
)
_PREFIXED = r"(?:[kcdmnMG]|\\mu\s*)?(?:m|g|s|L|l|N|J|W|V|A|Pa|Hz|Wh|mol|eV|bar|\\Omega)|\\Omega"
_WORDS = (
    r"(?:kilo|centi|milli)?(?:met(?:er|re)|gram|lit(?:er|re))s?|second|minute|hour|day|week|month|year|unit|mile|yard"
    r"|pound|gallon|degree|dollar|cent|newton|joule|watt|volt|ohm"
)
_UNIT = (
    rf"(?:(?:{_PREFIXED}|K|C|F|T|h|hr|min|sec|ft|in|mi|yd|lb|oz|mph|kph|inch(?:es)?|feet|foot"
    rf"|(?:(?:square|cubic)\s+)?(?:{_WORDS})s?|\\degree)(?![A-Za-z])(?:\s*\^\s*(?:\{{-?[1-9]\}}|-?[1-9]))?)"
)
_WITH_UNIT = re.compile(
    r"(?P<number>-?(?:[0-9][0-9.,]*(?:/[0-9]+)?|\\[dt]?frac\{?[0-9]+\}?\{?[0-9]+\}?))(?P<apart>\s*)"
    rf"(?P<unit>{_UNIT}(?:\s*(?:[/*\u00b7]|\\cdot|\bper\b|\s)\s*{_UNIT})*)"
)
_ROMAN = re.compile(r"\\(?:text|mathrm|textrm|operatorname|rm|mbox)\s*\{([^{}]*)\}")
_SPACE = re.compile(r"\\[,;:! ]|~|\\quad")
_LONGEST = 100  # characters of words
_WORD = re.compile(r"(?:[A-Za-z]{3,}|[Nn][Oo])(?: [A-Za-z]+)*")


def last_boxed(text: str) -> str:
    r"""What the last `\boxed{...}` (or `\boxed 6`, `\fbox{6}`) of a LaTeX text holds, stripped; "" for none.

    One that isn't closed holds nothing.
    """
    found = list(_BOXED.finditer(text))
    if not found or not found[-1][1]:
        return found[-1][2].rstrip(".,;:!?)*") if found else ""
    depth = 1
    for brace in _BRACE.finditer(text, found[-1].end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[found[-1].end() : brace.start()].strip(_WHITESPACE)
    return ""


def bare(text: str) -> str:
    r"""An answer without the `$`, `\(`, `\[`, `**` or backquotes that are around all of it."""
    found = _DELIMITED.fullmatch(text.strip())
    return bare(next(filter(None, found.groups()))) if found else text.strip().removeprefix("\\" * ("\\$" in text))


def number_and_unit(latex: str) -> tuple[str, str]:
    r"""A number's digits and its unit, "" for none: `45 m^3`, `5\ \text{km/h}`, `5 \Omega`; of other LaTeX itself."""
    plain = " ".join(_SPACE.sub(" ", _ROMAN.sub(r" \1", latex)).split())
    found = _WITH_UNIT.fullmatch(plain)
    # A capital that touches a number may be a factor of it.
    if not found or (not found["apart"] and re.fullmatch("[A-Z]", found["unit"])):
        return latex, ""
    return found["number"], found["unit"].replace(" ", "")


def word(latex: str) -> str:
    r"""The words that LaTeX writes, to be compared, such as "yes" for `\text{Yes.}`; "" for what are none."""
    said = normal_text(_ROMAN.sub(r"\1", latex))
    return said.lower() if len(said) <= _LONGEST and _WORD.fullmatch(said) else ""
