"""Completions and the answers that are read in them, by hand; the device has to read the same."""

from slpo_jax.rewards.answers import are_right, parse_completion, read_completion


def is_correct(text, reference, style):
    """What the host says of a completion; None is one that was cut."""
    return (
        text is not None
        and are_right([parse_completion(text, style)], [reference], style)[0]
    )


def ended_text(tokens, token_bytes, eos_id):
    """What tokens write; None where they don't end."""
    done = read_completion(tokens, token_bytes, (eos_id,))
    return done.text if done.ended else None


# Completion: what the coconut style reads, what the codi style reads.
COMPLETIONS = {
    "### 72": ("72", "72"),
    "72": ("72", "72"),
    "### 72.0\n": ("72", "72"),
    "### 072": ("72", "72"),
    "###\t\v\f\r 72 ": ("72", "72"),
    "### 1,450,000": ("1450000", "1450000"),
    "### -3.50": ("-3.5", "-3.5"),
    "### -0.0": ("0", "0"),
    "### 3244047.0999999996": ("3244047.0999999996", "3244047.0999999996"),
    "The answer is: 72": (None, "72"),
    "The answer is: 72.": (None, "72"),
    "### 72 apples": (None, "72"),
    "### $72": (None, "72"),
    "### 72 # 5": ("5", "5"),
    "72 #": (None, "72"),
    "# 5 # x": (None, "5"),
    "### +72": (None, "72"),
    "### - 72": (None, None),
    "### --72": (None, None),
    "### .5": (None, None),
    "### 5.": (None, "5"),
    "### 1e5": (None, None),
    "### 7 2": (None, "2"),
    "5-3": (None, None),
    "5 - 3": (None, None),
    "5-": (None, "5"),
    "1,45": (None, None),
    "1,4x": (None, None),
    "1,": (None, "1"),
    "-1,45": (None, None),
    "1234,567": (None, None),
    "1,2345": (None, None),
    "1,2345,678": (None, None),
    "1,234,56": (None, None),
    "1,45,678": (None, None),
    "-1,234,567.25": ("-1234567.25", "-1234567.25"),
    "1.5,300": (None, None),
    "1.2.3": (None, None),
    "1.2.3.4": (None, None),
    "1,234.5.6": (None, None),
    "1..5": (None, None),
    "0,123": ("123", "123"),
    "": (None, None),
    "#": (None, None),
    "no number": (None, None),
    "-,.": (None, None),
    "٧٢": (None, None),
    "−72": (None, "-72"),
    "72\u00a0": (None, "72"),
    "72\x1f": (None, "72"),
    "72\x00": (None, "72"),
    "72\ufffd": (None, "72"),
}

# The last number of a text; None where its last digits are a part of something else. The coconut style reads none.
LAST_NUMBERS = {
    # a minus, whatever it is written with
    "is −3": "-3", "is –3.": "-3", "is: -$3": "-3", "-€3,000": "3000", r"is -\$3.50": "-3.5", "x = -3": "-3",
    "$-3": "-3", "5, -3": "-3", "1) -3": "-3", "10-4=-3": "-3", "**-3**": "-3", r"\boxed{-3}": "-3", "5 −3": "-3",
    # a minus that is none, or stands apart
    "5-3": None, "5 - 3": None, "5–3": None, "$5-$3": None, "50%-60%": None, "(5)-3": None, "x-3": None,
    "twenty-3": None, "--3": None, "-(3)": None, "5*-3": None, "e^{-3}": None, "2020-05-03": None, "10 - 3 = 7": "7",
    "is - 3": None, "-> 7": "7", "is—7": "7",
    # parts of something else
    "1/2": None, "1 / 2": None, "3 1/2": None, r"\frac{1}{2}": None, r"\frac12": None, "½": None, "10^5": None,
    "2^{10}": None, "1e5": None, "2.01e-06": None, "0x10": None, "10100_2": None, "3+4": None, "72 cm^2": None,
    "72 m2": None, "72 cm²": "72", "72 cm": "72", "72kg": "72", "10:30": None, "1'000": None, "-1'000.5": None,
    "is .5": None, "is...72": None, "Rs.72": None, "answer:72": "72", "1:72": None, "f(2)(3)": None,
    "it's 5": "5", "'3'": "3", '"3"': "3", "\u20183\u2019": "3", "5' 3": "3", "the 1990s' 5": "5",
    "7 8": "8", "1 000": "0", "5\n-3": "-3", "5 -\n100": "100", "1/2 of it: 5": "5",
    # punctuation, markdown and money around it
    "**72**": "72", "**Answer** 72": "72", "is: $72.": "72", "… 72!": "72", "72%": "72", "£72": "72",
    "<<48/2=24>>24": "24", r"\(72\)": "72", "答案是72。": "72", "答案是-72。": "-72",
}  # fmt: skip
