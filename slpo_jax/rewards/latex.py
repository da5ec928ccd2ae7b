r"""What stands between an answer in LaTeX and math_verify: what it doesn't read, and what it would take for equal.

math_verify multiplies what stands side by side, letters and digits too, and leaves out units, subscripts and currency
signs. `comparisons` says what is to be asked instead.
"""

import re

from slpo_jax.rewards.equivalence import LONGEST
from slpo_jax.rewards.numerals import MINUSES

Pair = tuple[str, str]

_CURRENCY = r"\\?[$€£¥₩₹₽]"
_NUMBER = r"[+-]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
_BLANK = r"(?:\s|~|\\[ ,;:!])"
_TEXT = r"\\(?:text|textrm|textbf|textit|mathrm|mbox)\{"
_MARKS = ("**", "__", "*", "`")
_BOLD = re.compile(r"\\(?:boldsymbol|bm)\{([^{}]*)\}")
_GROUPS = re.compile(rf"([+-]?[0-9]{{1,3}})((?:(?:,\\!\s*|{_BLANK}+)[0-9]{{3}})+)((?:\.[0-9]+)?)")
_WORDS = r"(?:[A-Za-z]{4,}|[A-Z]{3}|[AP]M)(?:\s+[A-Za-z]+)*|[ap]\.m|(?:cm|mm|km|ft|in|yd|mi)(?=\^)"  # xy is a product
_IN_WORDS = re.compile(rf"({_NUMBER})\s+({_WORDS})(\^\{{?[23]\}}?)?")
_PERCENT = re.compile(rf"(.*?){_BLANK}*(?:\\?%|(?:{_TEXT}\s*)?percent\s*\}}?)", re.DOTALL)
_UNIT = re.compile(rf".*[0-9}})]{_BLANK}*{_TEXT}([^{{}}]*)\}}(?:\^\{{?[23]\}}?)?", re.DOTALL)
_LETTERS = re.compile(
    rf"(?:[^A-Za-z\\]|\\(?:[A-Za-z]+|[^A-Za-z]))*[0-9}})]{_BLANK}*([A-Za-z]+(?:/[A-Za-z]+)?)(?:\^\{{?([23])\}}?)?",
    re.DOTALL,
)
_NAME = re.compile(rf"(?:{_TEXT})?\s*([A-Za-z]{{2,}})\s*\}}?")
_TRAILING_BLANKS = re.compile(rf"{_BLANK}+\Z")
_BASED = re.compile(rf"([0-9][0-9A-Fa-f.,]*){_BLANK}*_\{{?(?:{_TEXT})?\s*(\w+)\s*\}}*")
_SIDE_BY_SIDE = re.compile(rf"[0-9](?:{_BLANK}+|x)[0-9]")
_PLURAL = re.compile("(ch|sh|ss|x)es$|(?<=[a-z][^s])s$")
_SHORT = {
    "meter metre": "m", "centimeter centimetre": "cm", "millimeter millimetre": "mm", "kilometer kilometre": "km",
    "foot feet": "ft", "inch": "in", "yard": "yd", "mile": "mi", "gram": "g", "kilogram": "kg", "milligram": "mg",
    "pound": "lb", "ounce": "oz", "liter litre": "l", "milliliter millilitre": "ml", "second sec": "s",
    "minute": "min", "hour hr": "h", "week": "wk", "year": "yr",
}  # fmt: skip
_SHORT_OF = {word: short for words, short in _SHORT.items() for word in words.split()}
_MULTIPLIERS = {"dozen", "hundred", "thousand", "million", "billion", "trillion"}
_SYMBOL = (
    "(?:[cdkm]?m|in|ft|yd|mi|[km]?g|lbs?|oz|[cdm]?[lL]|gal|m?s|sec|min|hr?|N|k?J|k?Wh?|V|k?Hz|k?Pa|k?cal|mol|rad|ha)"
)
_SYMBOLS = re.compile(f"{_SYMBOL}(?:/{_SYMBOL})?")
_NO_UNITS = {"a", "an", "of", "per", "square", "sq", "cubic", "cu"}
_RAISED = {ord("°"): r"^\circ", ord("²"): "^2", ord("³"): "^3"}
_COMMAND = re.compile(r"\\[a-z]+\s*[0-9]\s+[0-9]")  # \frac 1 2


def comparisons(answer: str, reference: str) -> list[Pair]:
    """What is to be equivalent for an answer to be right: one of these pairs; none where it is wrong already."""
    if max(len(answer), len(reference)) > LONGEST:  # only numbers are compared
        return [(answer, reference)]
    answer, reference = tidied(answer), tidied(reference)
    if answer != reference and _differ(answer, reference):
        return []
    numbers = [_without_symbols(text) or text for text in (answer, reference)]
    others = [(numbers[0], numbers[1])] if (numbers[0] == answer) != (numbers[1] == reference) else []
    percents = [_PERCENT.fullmatch(text) for text in (answer, reference)]
    bare = [found[1] if found else text for found, text in zip(percents, (answer, reference), strict=True)]
    if all(percents) or not any(percents):
        return [(bare[0], bare[1]), *others]
    hundredth = [_hundredth(text) if found else text for found, text in zip(percents, bare, strict=True)]
    return [(bare[0], bare[1]), (hundredth[0], hundredth[1])]


def _without_symbols(latex: str) -> str | None:
    """What stands before a unit that is written in bare letters, as in `45 m^2`; None where no unit does."""
    found = _LETTERS.fullmatch(latex)
    before = latex[: found.start(1)] if found else ""
    bare = _TRAILING_BLANKS.sub("", before)
    return bare if found and bare != before and _SYMBOLS.fullmatch(found[1]) else None


def _hundredth(latex: str) -> str:
    return f"{latex}e-2" if re.fullmatch(_NUMBER, latex) else rf"\frac{{{latex}}}{{100}}"


def tidied(latex: str) -> str:
    r"""An expression without what is written around it: `**73**`, `= 5`, `€29`, `29.00.`; `1 000` is 1000.

    Words after a number become a `\text{}`.
    """
    latex = latex.translate(dict.fromkeys(map(ord, MINUSES), "-")).translate(_RAISED).strip()
    for mark in _MARKS:
        if len(latex) > 2 * len(mark) and latex.startswith(mark) and latex.endswith(mark):
            latex = latex[len(mark) : -len(mark)].strip()
    bold = _BOLD.fullmatch(latex)
    latex = (bold[1] if bold else latex).lstrip("= ")
    number = re.sub(rf"{_CURRENCY}\s*", "", latex.rstrip(" .,;")).strip()
    number = re.sub(r"^([+-])\s+", r"\1", number)
    groups = _GROUPS.fullmatch(number)
    if groups:
        number = groups[1] + re.sub("[^0-9]", "", groups[2]) + groups[3]
    if re.fullmatch(_NUMBER, number):
        return number
    words = _IN_WORDS.fullmatch(number)
    return rf"{words[1]}\text{{ {words[2].strip()}}}{words[3] or ''}" if words else latex


def _differ(answer: str, reference: str) -> bool:
    """Whether two expressions that math_verify may take for equal are not."""
    pair = (answer, reference)
    if any(_SIDE_BY_SIDE.search(_COMMAND.sub("", text)) for text in pair):
        return True
    if any(_BASED.fullmatch(text) for text in pair):
        based = [_BASED.fullmatch(text) for text in pair]
        return not all(based) or len({found.groups() for found in based if found}) > 1
    names = [found[1] for found in map(_NAME.fullmatch, pair) if found]
    if len(names) == 2 and any(name != name.lower() or len(name) > 3 for name in names):
        return names[0].lower() != names[1].lower()
    found = [_UNIT.fullmatch(text) or _LETTERS.fullmatch(text) for text in pair]
    left, right = (_unit(match[1]) if match else set() for match in found)
    if left & _MULTIPLIERS != right & _MULTIPLIERS:
        return True
    if left and right and (left <= right or right <= left):
        return len({_power(match[0][match.start(1) :]) for match in found if match}) > 1
    if not (left and right):
        return False
    products = [match[1] + match[1][-1] * (int(match[2] or 1) - 1) for match in found if match and match.re is _LETTERS]
    return len(products) < 2 or sorted(products[0]) != sorted(products[1])  # 5xy is 5yx


def _power(unit: str) -> str:
    """The last power in a unit: "2" of `cm}^2` and of `square cm`."""
    spelled = re.sub(r"\b(square|sq)\b", "^2", re.sub(r"\b(cubic|cu)\b", "^3", unit))
    return next(iter(re.findall(r"\^\{?([23])", spelled)[-1:]), "1")


def _unit(words: str) -> set[str]:
    """The words of a unit, each in the singular, and short if it is in the table."""
    spelled = words.lower().replace(".", "").replace("mph", "miles per hour")
    singular = {_PLURAL.sub(r"\1", word) for word in re.findall("[a-z]+", spelled)}
    return {_SHORT_OF.get(word, word) for word in singular - _NO_UNITS}
