"""What every benchmark's command does with flags that it can't use."""

import pytest

from benchmarks import floor, passk, step

EVERY = [
    (["--shapes", "llama"], "--shapes"),
    (["--json", "no/such/folder/out.json"], "--json: no/such/folder"),
    (["--json", "."], "--json: ."),
]
OWN = {
    step: [
        (["--prompts", "some"], "--prompts"),
        (["--steps", "0"], "--steps: 0"),
        (["--warmup", "-1"], "--warmup: -1"),
        (["--only", "4"], "give K,G, e.g. 4,8"),
        (["--only", "4,1"], "--only: K must be"),
        (["--growth", "width"], "--growth"),
        (["--growth", "K", "--only", "4,8"], "--growth: it has no --only"),
        (["--step", "3"], "--step"),
    ],
    passk: [
        (["--samples", "0"], "--samples: 0"),
        (["--batch_size", "0"], "--batch_size: 0"),
        (["--rounds", "none"], "--rounds"),
        (["--torch", "fast"], "--torch"),
    ],
    floor: [(["--prompts", "0"], "--prompts: 0"), (["--steps", "3"], "--steps")],
}


@pytest.mark.parametrize(
    ("module", "flags", "fault"), [(module, *case) for module, own in OWN.items() for case in (*EVERY, *own)]
)
def test_bad_flags_end_with_one_line_and_status_2(module, flags, fault, capsys):
    with pytest.raises(SystemExit) as stop:
        module.main(flags)
    assert stop.value.code == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert fault in error
    assert error.count("\n") == 1
