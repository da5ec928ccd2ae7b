"""What every benchmark's command does with flags that it can't use."""

import pytest


def check_one_line(main, flags, fault, capsys) -> None:
    """One line on standard error that names the fault, nothing else, and status 2."""
    with pytest.raises(SystemExit) as stop:
        main(flags)
    assert stop.value.code == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert fault in error
    assert error.count("\n") == 1
