"""What every benchmark's command does with flags that it can't use."""

import pytest

from benchmarks import gradients, grpo, memory, passk, predicted, real, step, versus

EVERY = [
    (["--shapes", "bert"], "--shapes"),  # memory has no such flag at all
    (["--json", "no/such/folder/out.json"], "--json: no/such/folder"),
    (["--json", "."], "--json: ."),
    (["--json", "/proc/out.json"], "--json: /proc/out.json can't be written"),
]
OWN = {
    step: [
        (["--prompts", "some"], "--prompts"),
        (["--steps", "0"], "--steps: 0"),
        (["--warmup", "-1"], "--warmup: -1"),
        (["--only", "4"], "give K,G, e.g. 4,8"),
        (["--only", "4,1"], "--only: K must be"),
        (["--step", "3"], "--step"),
    ],
    passk: [
        (["--samples", "0"], "--samples: 0"),
        (["--batch_size", "0"], "--batch_size: 0"),
        (["--rounds", "none"], "--rounds"),
        (["--torch", "fast"], "--torch"),
    ],
    memory: [
        (["--models", "gpt3"], "--models"),
        (["--count", "0"], "--count: 0"),
        (["--fsdp", "3"], "--fsdp: 3 does not divide --count 4"),
        (["--with", "rl"], "--with: 'rl' is not KEY=VALUE"),
    ],
    versus: [
        (["--pairs", "0"], "--pairs: 0"),
        (["--what", "all"], "--what"),
    ],
    grpo: [
        (["--samples", "1"], "--samples: 1"),
        (["--caches", "offloaded"], "--caches"),
        (["--losses", "fast"], "--losses"),
    ],
    gradients: [
        (["--right", "many"], "--right: many"),
        (["--dropout", "prompt"], "--dropout: no prompt"),
        (["--batches", "1"], "--batches: 1"),
    ],
    predicted: [(["--model", "gpt3"], "--model")],
    real: [
        (["--seconds", "0"], "--seconds: 0"),
        (["--micro_batches", "3"], "--micro_batches"),
    ],
}

REQUIRED = {gradients: ["."], versus: ["."], grpo: ["problems.json"]}


@pytest.mark.parametrize(
    ("module", "flags", "fault"),
    [(module, *case) for module, own in OWN.items() for case in (*EVERY, *own)],
)
def test_bad_flags_end_with_one_line_and_status_2(module, flags, fault, capsys):
    with pytest.raises(SystemExit) as stop:
        module.main([*REQUIRED.get(module, []), *flags])
    assert stop.value.code == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert fault in error
    assert error.count("\n") == 1
