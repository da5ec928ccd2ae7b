"""What `launch/first_run.py` makes of a recorded terminal, and how it is drawn."""

import re

import pytest

import figure
import first_run


def _record(folder, *written):
    """A recording as the program `script` writes one; a text each second."""
    file = folder / "shown"
    texts = [text.encode() for text in written]
    file.write_bytes(b"Script started on a day\n" + b"".join(texts))
    timing = "".join(f"1.0 {len(text)}\n" for text in texts)
    (folder / "shown.timing").write_text(timing)
    return file


def test_a_line_that_is_written_anew_has_versions(tmp_path):
    file = _record(
        tmp_path, "a █ line\r\n", "\rbar 1", "\rbar \x1b[1m2", "\r     \rend\r\n"
    )
    rows = first_run.terminal(first_run.chunks(file))
    assert [row for row in rows if row[1]] == [
        ["0", "a █ line", 1.0, None],
        ["1", "bar 1", 2.0, 3.0],
        ["1", "bar 2", 3.0, 4.0],
        ["1", "end", 4.0, None],
    ]


def test_a_long_line_goes_on_in_the_next(tmp_path):
    full = "x" * first_run.COLUMNS
    file = _record(tmp_path, f"{full}\r{full}yz\r\n")
    rows = first_run.terminal(first_run.chunks(file))
    assert [row[1] for row in rows] == [full, "yz", ""]


def test_many_versions_are_thinned(tmp_path):
    file = _record(tmp_path, *(f"\r{number} of 99" for number in range(100)))
    texts = [text for _, text, *_ in first_run.terminal(first_run.chunks(file))]
    assert (texts[0], texts[-1]) == ("0 of 99", "99 of 99")
    assert 6 <= len(texts) <= 12


@pytest.mark.parametrize("until", [None, 4.0])
def test_a_terminal_without_motion_shows_its_end(until):
    rows = [["0", "begin", 1.0, until], ["1", "end", 4.0, None]]
    svg = figure.terminal({"rows": rows}, "run")
    hidden = re.findall(r"^#t(\d) {opacity: 0}", svg, re.MULTILINE)
    assert hidden == ([] if until is None else ["0"])
