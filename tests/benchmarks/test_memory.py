"""The memory of a step, as compiled: its parts add up, sharding takes a part away, and the shipped configs fit."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import memory
from benchmarks.measure import compiled
from benchmarks.measure.programs import STAGES, programs
from benchmarks.measure.targets import target
from slpo_jax.errors import UserError
from slpo_jax.stages import EVALUATE

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.usefixtures("cpu_devices")]
TINY = {
    "model.n_layer": 1, "model.n_embd": 32, "model.n_head": 2, "tokenizer": "synthetic:20", "prompt_slots": (16,),
    "max_latents": 3, "max_answer_tokens": 3, "rl.batch_size": 8, "rl.group": 2, "objective.slpo.passes": 2,
}  # fmt: skip
SMALL_LLAMA = {"model.n_kv_head": 1, "model.n_inner": 64, "max_answer_tokens": 8}
LARGEST = {
    "rl.capacities": ((1.0, 1.0),)
}  # of a scoring pass: of the smaller ones, each compiled, only one runs


def test_a_program_s_memory_is_what_it_holds():
    """Donated arguments make room for results."""
    x = jnp.ones((256, 256))
    kept = compiled.device_memory(jax.jit(lambda x: x + 1).lower(x).compile())
    given = compiled.device_memory(
        jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
    )
    assert (kept["arguments"], kept["total"], given["total"]) == (
        x.nbytes,
        2 * x.nbytes,
        x.nbytes,
    )


@pytest.mark.nightly
def test_parameters_in_parts_take_less(monkeypatch, capsys, tmp_path):
    """The command at tiny shapes: a quarter of the parameters' state, and what is gathered is said."""
    file, changes = memory.MODELS["gpt2"]
    monkeypatch.setitem(memory.MODELS, "gpt2", (file, changes | TINY | LARGEST))
    monkeypatch.setattr(memory, "set_up", lambda devices: None)
    memory.main(["--fsdp", "1", "4", "--json", str(tmp_path / "all.json")])
    rows = [
        line.strip("| ").split(" | ")
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| gpt2")
    ]
    assert [row[:4] for row in rows] == [
        ["gpt2, float32", "rl", "4 cpu", fsdp] for fsdp in ("1", "4")
    ]
    whole, cut = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert whole["parameters"] * 4 < whole["arguments"] < whole["parameters"] * 4 * 1.3
    assert 0.2 < cut["arguments"] / whole["arguments"] < 0.35
    assert cut["sent"] > whole["sent"] > whole["parameters"] * 4
    assert cut["collectives_in_loops"] == 0 < cut["collectives"]
    assert whole["flops"] == cut["flops"] > 0


@pytest.mark.nightly
def test_a_step_with_the_host_between_is_two_programs(monkeypatch):
    """The first holds the parameters, the second AdamW's moments of them too."""
    name = "soft_llama1b:lepo"
    file, changes = memory.MODELS[name]
    tiny = TINY | SMALL_LLAMA | {"rl.micro_batches": 2}
    monkeypatch.setitem(memory.MODELS, name, (file, changes | tiny | LARGEST))
    monkeypatch.setattr(memory, "set_up", lambda devices: None)
    result = memory.benchmark(
        memory.parse(["--models", name, "--with", "model.dtype=bfloat16"])
    )
    rollout, improvement = result["rows"]
    weights = 4 * rollout["parameters"]
    assert weights < rollout["arguments"] < 1.05 * weights
    assert 3 * weights < improvement["arguments"] < 3.1 * weights
    assert (
        rollout["sent"] == 0 < 0.99 * weights < improvement["sent"]
    )  # no gradient of the gate that is not there
    text = memory.markdown(result)
    assert [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| soft")] == [
        "rl rollout", "rl policy update"
    ]  # fmt: skip


def test_adapters_alone_are_counted_with_moments_and_what_is_trained_whole_with_a_reference():
    """HRPO's, of rank 32: beside the parameters two moments of adapters and the latent policy's, nothing compiled."""
    tiny = TINY | SMALL_LLAMA | {"latent_policy.hybrid.end_text": ""}
    _, shapes = memory.MODELS["soft_llama1b:hrpo"]
    point = memory.Point(
        "soft_llama1b:hrpo", changes=tuple((shapes | tiny | LARGEST).items())
    )
    setup = memory.setup_of(point, jax.devices("cpu")[:1])
    rollout, improvement = programs(setup, "rl")
    state, _, reference = rollout.arguments
    assert reference.keys() == {"latent_policy"}
    assert state.params.keys() == {"reasoner", "gate", "latent_policy", "adapter"}
    sizes = {
        name: sum(x.size for x in jax.tree.leaves(tree))
        for name, tree in state.params.items()
    }
    widths = (
        2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64)
    )  # in + out: q, o; k, v; the MLP's three
    assert sizes["adapter"] == 32 * widths
    moments = sum(
        x.size for x in jax.tree.leaves(improvement.arguments[0].opt_state) if x.ndim
    )
    assert moments == 2 * (sizes["adapter"] + sizes["latent_policy"])


def test_a_run_s_own_config_can_be_asked_about(tmp_path):
    """By its file; what it lacks or misnames is said."""
    lines = ["from small_run import CONFIG", "exec(CONFIG)"]
    (tmp_path / "own.py").write_text("\n".join(lines) + "\n")
    point = memory.Point(
        str(tmp_path / "own.py"), "cold_start", 2, (("data.train", "synthetic:train"),)
    )
    setup = memory.setup_of(point, jax.devices("cpu")[:4])
    assert setup.config.model.n_embd == 16
    assert dict(setup.mesh.shape) == {"data": 2, "fsdp": 2}
    with pytest.raises(UserError, match=r"--with: model\.no_such_key=1"):
        memory.setup_of(dataclasses.replace(point, changes=(("model.no_such_key", 1),)))
    with pytest.raises(UserError, match=r"--models: 'own\.py'.*graph, gpt2"):
        memory.parse(["--models", "own.py"])


def test_products_are_counted_with_their_loops():
    """64 x 64 matrices: 5 in a scan, 7 in a loop with a bound, 3 in one without, the larger of 1 and 2 in a branch."""
    from benchmarks.measure.products import products

    def body(x, y):
        x, _ = jax.lax.scan(lambda x, _: (x @ y, None), x, length=5)
        _, x = jax.lax.while_loop(
            lambda s: (s[0] < 7) & (s[1][0, 0] > 0),
            lambda s: (s[0] + 1, s[1] @ y),
            (0, x),
        )
        x = jax.lax.while_loop(lambda x: x.any(), lambda x: x @ y, x)
        return jax.checkpoint(
            lambda x: jax.lax.cond(
                x[0, 0] > 0,
                lambda x: x @ y,
                lambda x: x @ y @ y,
                x,
            )
        )(x)

    x = jnp.ones((64, 64))
    assert products(jax.jit(body).trace(x, x), trips=3) == 2 * 64**3 * (5 + 7 + 3 + 2)


def test_traffic_and_the_largest_array_are_those_of_the_program():
    """A scan of five products of [64, 64]: each reads two, one of which is cut out, and writes one."""
    x = jnp.ones((64, 64))
    stack = jnp.ones((5, 64, 64))
    looped = (
        jax.jit(lambda x, stack: jax.lax.scan(lambda x, y: (x @ y, None), x, stack)[0])
        .lower(x, stack)
        .compile()
    )
    assert compiled.largest(looped) == ("f32[5,64,64]", stack.nbytes)
    assert 15 * x.nbytes <= compiled.traffic(looped, 1) <= 40 * x.nbytes


@pytest.mark.parametrize(
    ("device", "count", "fault"),
    [
        ("vulkan", 4, "--device: 'vulkan' is unknown; give cpu or one of cuda:a100, cuda:a6000"),
        ("cuda:b900", 4, "--device: cuda:b900 has no description in benchmarks/targets; add a b900.txtpb, or use"),
        ("tpu:v9", 4, "--device: tpu:v9 is unknown; use tpu:v5e"),
        ("tpu:v5e", 3, "--count: there is no slice of 3 tpu:v5e; give one of 1, 4"),
        ("cuda:h100", 4, "--device: can't compile for cuda:h100 (ImportError: no plugin); install its plugin: python"),
        ("cuda:mine", 4, "mine.txtpb: has no device_memory_size"),
    ],
)  # fmt: skip
def test_devices_that_can_t_be_compiled_for(
    device, count, fault, monkeypatch, tmp_path
):
    def refuses(**_):
        raise ImportError("no plugin")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", refuses)
    if device == "cuda:mine":
        monkeypatch.setattr("benchmarks.measure.targets.FOLDER", tmp_path)
        (tmp_path / "mine.txtpb").touch()
    with pytest.raises(UserError, match=re.escape(fault)):
        target(device, count)


@pytest.mark.parametrize(
    ("model", "stage", "changes", "fault"),
    [
        ("soft_llama1b:slpo", "cold_start", {}, "gate"),
        (
            "graph",
            "rl",
            {"rl.micro_batches": 7},
            "config.rl.batch_size: .* is not a multiple of",
        ),
        (
            "graph",
            "rl",
            {"model.n_head": 5},
            "config.model.n_embd: .* is no multiple of model.n_head",
        ),
        ("README.md", "rl", {}, "--models: README.md is no config"),
    ],
)
def test_what_a_run_would_refuse_is_refused(model, stage, changes, fault):
    with pytest.raises(UserError, match=fault):
        memory.setup_of(
            memory.Point(
                model,
                stage,
                1,
                tuple(changes.items()),
            )
        )


PLUGINS = {"tpu:v5e": "libtpu", "cuda:a6000": "jax_cuda12_plugin"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "fsdp"),
    [
        ("graph", 1),
        ("graph", 4),
        ("gpt2", 1),
    ],
)
@pytest.mark.parametrize("device", PLUGINS)
def test_shipped_programs_compile_and_fit(device, model, fsdp, tmp_path):
    """For four of them, as the configs are: no loop waits for other devices, a gradient is summed once, in place."""
    if find_spec(PLUGINS[device]) is None:
        pytest.skip(
            f"nothing here compiles for {device}: python -m pip install -e '.[aot]'"
        )
    flags = [
        "--device",
        device,
        "--models",
        model,
        "--fsdp",
        str(fsdp),
        "--json",
        str(tmp_path / "rows.json"),
    ]
    command = [sys.executable, "-m", "benchmarks.memory", "--stages", *STAGES, *flags]
    subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": ""},
        check=True,
    )
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["stage"] for row in rows} == set(STAGES)
    for row in rows:
        assert not row["failed"]
        assert row["fits"]
        assert row["collectives_in_loops"] == 0
        # In parts: all parameters at the start too, and of small gradients the whole sum.
        assert row["sent"] <= 4 * row["parameters"] * (1.1 if fsdp == 1 else 2.5)
        if row["stage"] != EVALUATE:
            assert row["donated"] > 0.95 * row["arguments"] - 1e6  # all but the batch
