"""The imitate stage with CODI and adapters, iCoT and Latent-SFT: what it leaves, and how it goes on from a cut."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from codi_run import small_config
from imitation import Crash, crash_at, fake_steps, run_imitation
from same_run import assert_same, assert_same_run, checkpoint_of, rows_of
from slpo_jax.config import config_checks
from slpo_jax.config.config import read_config
from slpo_jax.errors import UserError
from slpo_jax.run import train_imitation
from slpo_jax.run.experiment import build, rows
from slpo_jax.run.imitation_plan import plan_phases
from slpo_jax.run.run_stages import check_stages
from slpo_jax.run.setup import assemble
from slpo_jax.run.train_stage import read_stage_params
from slpo_jax.training import loop
from slpo_jax.training.recipes.distil import Distillation
from small_run import load_config

pytestmark = pytest.mark.usefixtures("cpu_devices")
RANK = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("codi")
    small_config(folder)
    return folder


def _codi(folder, **changes):
    config = small_config(folder)
    config.imitate.lora.rank = RANK
    config.imitate.update(changes)
    return config


@pytest.mark.slow
def test_codi_with_adapters(folder, tmp_path, caplog):
    """Real steps: the loss falls, and what is left is plain parameters that differ by a low rank."""
    config = _codi(folder, cot_steps=0, final_steps=14)
    config.model.n_embd = 8  # four times the rank
    text, config.data.train = (
        Path(config.data.train).read_text(),
        str(tmp_path / "train.jsonl"),
    )
    (tmp_path / "train.jsonl").write_text(
        text.replace('"answer": "4"', '"answer": "-4"', 1)
    )
    experiment = run_imitation(config, tmp_path)
    said = "imitate: left out 1 of 36 problems: 1 that distil leaves out, as CODI does negative answers"
    assert said in caplog.messages
    losses = [row["loss"] for row in rows_of(tmp_path)]
    assert len(losses) == 14
    assert np.median(losses[-7:]) < losses[0] - 1.0  # at this rate it has spikes
    assert [path.name for path in (tmp_path / "checkpoints").glob("imitate*")] == [
        "imitate"
    ]
    before = jax.tree.map(np.asarray, experiment.initial_params())
    after = jax.tree.map(np.asarray, read_stage_params(experiment.stage("imitate")))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    kernels = 0
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        name = jax.tree_util.keystr(path)
        change = new - old
        if "projector" in name:
            assert np.abs(change).max() > 1e-3, name
        elif "kernel" in name and "backbone" in name:
            kernels += 1
            spread = np.linalg.svd(change, compute_uv=False)
            assert spread[RANK - 1] > 1e-4 > 100 * spread[RANK], name
        else:
            assert (change == 0).all(), name
    assert kernels == 4


@pytest.fixture
def fake(monkeypatch):
    kernel = {
        "h_0": {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3)},
        "wte": jnp.ones(5),
    }
    tiny = {
        "reasoner": {"backbone": kernel, "projector": {"w": jnp.arange(3.0)}},
        "gate": {"w": jnp.ones(2)},
    }

    def numbers_of(batch):
        batch = getattr(
            batch, "base", batch
        )  # SIM-CoT's has what its decoder is to say beside it
        return (
            batch.suffix.tokens * batch.suffix.weights
            if hasattr(batch, "suffix")
            else batch.draw_ids
        )

    return fake_steps(monkeypatch, tiny, numbers_of)


def _crash_at(fake, config, workdir, *steps):
    """Cut at each of these steps, one after the other."""
    for step in steps:
        fake["at"] = ("imitate", step)
        with pytest.raises(Crash):
            run_imitation(config, workdir)


@pytest.mark.slow
def test_adapters_go_on_wherever_they_were_cut(fake, folder, tmp_path, monkeypatch):
    """In a step, between two phases, before the adapters are merged, and before and after the end is written down."""
    config = _codi(folder, cot_steps=4, final_steps=5)
    run_imitation(config, tmp_path / "whole")
    assert fake["steps"] == [("imitate", step) for step in range(9)]
    assert fake["trained"] == ("adapter",)
    whole = checkpoint_of(tmp_path / "whole", "imitate")
    assert whole["step"] == 9
    assert (whole["['params']['reasoner']['backbone']['h_0']['kernel']"] != 1).any()
    assert (whole["['params']['reasoner']['backbone']['wte']"] == 1).all()
    assert not any("adapter" in path for path in whole)
    _crash_at(fake, config, tmp_path / "cut", 0, 3, 4, 8)
    left = tmp_path / "cut" / "checkpoints" / "imitate_adapter"
    remove = shutil.rmtree

    def cut(path, *_, **settings):
        if not isinstance(path, Path) or path == left:
            raise Crash
        remove(path, **settings)

    for place, name in (
        (train_imitation, "save_finished"),
        (train_imitation, "note_finished"),
        (shutil, "rmtree"),
    ):
        assert not (left.parent / "imitate" / "finished").exists()
        with monkeypatch.context() as patch:
            patch.setattr(place, name, cut)
            with pytest.raises(Crash):
                run_imitation(config, tmp_path / "cut")
    assert left.is_dir()
    run_imitation(config, tmp_path / "cut")
    assert not left.exists()
    assert_same_run(tmp_path / "cut", tmp_path / "whole", "imitate")


def _simcot(**changes):
    config = load_config()
    config.stages = ("imitate",)
    config.rl.steps = 2
    config.imitate.update(
        recipe="simcot", cot_steps=2, final_steps=3, final_latents="published"
    )
    config.imitate.simcot.keep = True
    config.imitate.optimizer.warmup_steps = 0
    config.imitate.update(changes)
    return config


@pytest.mark.slow
def test_further_imitation_is_a_longer_imitation_by_simcot(tmp_path, monkeypatch):
    """With the decoder and the optimizer's state, to the bit; also where it was cut."""
    run_imitation(_simcot(final_steps=5, control=False), tmp_path / "longer")
    with monkeypatch.context() as patch:
        crash_at(patch, train_imitation, 4, 6)
        config = _simcot()
        config.checkpoint_every = 1
        for _ in range(2):
            with pytest.raises(Crash):
                run_imitation(config, tmp_path / "shorter")
        assert (tmp_path / "shorter" / "checkpoints" / "imitate" / "finished").exists()
        run_imitation(config, tmp_path / "shorter")
    longer = checkpoint_of(tmp_path / "longer", "imitate")
    further = checkpoint_of(tmp_path / "shorter", "imitate_control")
    assert any("decoder" in path for path in further)
    assert_same(longer, further)
    left = {
        path.name
        for path in (tmp_path / "shorter" / "checkpoints").iterdir()
        if path.is_dir()
    }
    assert {name for name in left if name.startswith("imitate")} == {
        "imitate",
        "imitate_control",
    }


@pytest.mark.slow
def test_further_imitation_has_a_rate_of_its_own(tmp_path):
    run_imitation(_simcot(control_rate=1e-3), tmp_path)
    rates = {stage: {row["learning_rate"] for row in rows_of(tmp_path) if row["stage"] == stage}
             for stage in ("imitate", "imitate_control")}  # fmt: skip
    assert {stage: [*map(pytest.approx, found)] for stage, found in rates.items()} == {
        "imitate": [3e-2], "imitate_control": [1e-3]
    }  # fmt: skip


@pytest.mark.slow
def test_no_latents_take_the_steps_that_simcot_took(fake, tmp_path, monkeypatch):
    """Its stages end when they are learned; without latents they end there too."""
    monkeypatch.setattr(loop, "WINDOW", 3)
    fake["learns"] = True
    run_imitation(
        _simcot(
            cot_steps=14,
            final_steps=10,
            stage_until=0.685,
            stage_least=2,
            no_thought=True,
        ),
        tmp_path,
    )
    steps = {
        stage: checkpoint_of(tmp_path, stage)["step"]
        for stage in ("imitate", "imitate_control")
    }
    assert steps == {"imitate": 17, "imitate_control": 19}
    assert checkpoint_of(tmp_path, "imitate_no_thought")["step"] == 17


def test_further_imitation_needs_what_simcot_trained(fake, tmp_path):
    run_imitation(_simcot(control=False), tmp_path)
    with pytest.raises(
        UserError, match=r"config\.imitate\.control: .*another --workdir"
    ):
        run_imitation(_simcot(), tmp_path)


def test_further_imitation_that_is_finished_takes_no_more_steps(fake, tmp_path):
    """What simcot trained is gone by then, and the line says so; a smoke test's steps are no reason to."""
    config = _simcot()
    experiment = run_imitation(config, tmp_path)
    config.rl.steps = 3
    more = read_config(config)
    check_stages(experiment, uncut=more)
    with pytest.raises(UserError, match=r"config\.rl\.steps: 3, .* ended after 2,"):
        check_stages(build(more, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("final_fraction", "control_rate", "is_refused"),
    [(0.0, 0.0, True), (0.1, 0.0, False), (0.0, 1e-3, False)],
)
def test_further_imitation_needs_a_rate(
    fake, tmp_path, final_fraction, control_rate, is_refused
):
    config = _simcot(control_rate=control_rate)
    config.imitate.optimizer.update(schedule="linear", final_fraction=final_fraction)
    if not is_refused:
        run_imitation(config, tmp_path)
        return
    with pytest.raises(
        UserError, match=r"^config\.imitate\.control_rate: 0 .*schedule=linear; give"
    ):
        run_imitation(config, tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("reset_optimizer", [True, False])
def test_a_schedule_falls_from_one_reset_of_the_optimizer_to_the_next(reset_optimizer):
    """So without resets it goes through all phases, and not one of them is trained at a rate of 0."""
    config = load_config()
    config.imitate.update(
        cot_steps=4, stage_steps=3, final_steps=5, reset_optimizer=reset_optimizer
    )
    config.imitate.optimizer.update(schedule="cosine", warmup_steps=0)
    _, phases, optimizer_configs = plan_phases(assemble(read_config(config)))
    lengths = [phase.end - phase.start for phase in phases]
    assert len(phases) > 2
    expected = lengths if reset_optimizer else [sum(lengths)] * len(phases)
    assert [each.total_steps for each in optimizer_configs] == expected


@pytest.mark.parametrize(
    ("reasoner", "settings", "why"),
    [
        ("coconut_gpt2", {"lora": {"rank": RANK}}, "lora.rank trains adapters"),
        (
            "codi_gpt2",
            {"stage_steps": 4},
            "takes 9 steps .* simcot takes 5",
        ),  # CODI has no stages
    ],
)
def test_no_latents_train_the_whole_reasoner_in_as_many_steps(
    tmp_path, reasoner, settings, why
):
    config = _simcot(no_thought=True, **settings)
    config.reasoner = reasoner
    with pytest.raises(UserError, match=rf"config\.imitate\.no_thought: .*{why}"):
        run_imitation(config, tmp_path)


def test_updates_are_scaled_by_alpha_over_the_rank(fake, folder, tmp_path, monkeypatch):
    """In the loss, which stands for what it is given here, and in what the stage leaves."""
    monkeypatch.setattr(
        Distillation,
        "loss",
        lambda self, policy, params, batch, key, gate_weight: (
            params["reasoner"],
            None,
            None,
        ),
    )
    config = _codi(folder, cot_steps=0, final_steps=2)
    config.imitate.lora.alpha = 5.0
    run_imitation(config, tmp_path)
    params = fake["params"]
    pair = params["adapter"]["lora"]["h_0"]
    expected = (
        params["reasoner"]["backbone"]["h_0"]["kernel"]
        + 5.0 / RANK * pair["A"] @ pair["B"]
    )
    assert np.abs(expected - 1).max() > 1e-3
    seen = fake["loss_fn"](params, None, None)[0]["backbone"]["h_0"]["kernel"]
    left = checkpoint_of(tmp_path, "imitate")[
        "['params']['reasoner']['backbone']['h_0']['kernel']"
    ]
    for kernel in (seen, left):
        np.testing.assert_allclose(kernel, expected, rtol=1e-6)


# iCoT: 136 problems are 17 steps of 8, and a chain is six tokens: "1 + 2 = 3" and a line break.
COT = 4
RISE = 3
TOTAL = 30
RISES = [COT + RISE * s for s in range(1, 7)]


def _icot(**changes):
    config = load_config()
    config.max_latents = 0
    config.gate.enabled = False
    config.stages = ("imitate",)
    config.checkpoint_every = 4
    config.imitate.update(
        recipe="icot",
        c_thought=0,
        cot_steps=COT,
        final_steps=TOTAL - COT,
        control=False,
    )
    config.imitate.icot.update(tokens_per_epoch=6, offset_decay=0.5)
    config.imitate.optimizer.warmup_steps = 0
    config.imitate.update(changes)
    return config


@pytest.mark.slow
def test_each_rise_has_a_fresh_optimizer_wherever_the_run_was_cut(fake, tmp_path):
    """One program, for batches with texts and without; killed at a rise, within one, and in the answer alone."""
    config = _icot()
    config.data.train = shutil.copy(config.data.train, tmp_path)
    run_imitation(config, tmp_path / "whole")
    assert fake["steps"] == [("imitate", step) for step in range(TOTAL)]
    assert fake["fresh"] == [0, COT, *RISES]
    assert list(map(len, fake["slots"].values())) == [2]
    assert checkpoint_of(tmp_path / "whole", "imitate")["step"] == TOTAL
    fake["fresh"].clear()
    # At 4 checkpoints apart, they go on from steps 4, 8, 16 and 28: where the rises begin, within one, and at one.
    _crash_at(
        fake, config, tmp_path / "cut", RISES[0], RISES[2] - 2, RISES[4], TOTAL - 1
    )
    run_imitation(config, tmp_path / "cut")
    assert set(fake["fresh"]) == {0, COT, *RISES}
    assert_same_run(tmp_path / "cut", tmp_path / "whole", "imitate")
    fake["steps"].clear()
    (
        tmp_path / "train.jsonl"
    ).unlink()  # what is finished needs no data to know its phases by
    run_imitation(config, tmp_path / "whole")
    assert fake["steps"] == []


LABELS = {
    "CoT-SFT": {
        "recipe": "",
        "final_steps": 0,
        "stage_steps": 9,
        "max_latent_stage": 0,
    },
    "no latents": {"recipe": ""},
    "iCoT": {},
    "SFT, last steps written": {
        "recipe": "",
        "final_steps": 0,
        "stage_steps": 9,
        "max_latent_stage": 1,
    },
}


@pytest.mark.parametrize("label", LABELS)
def test_rows_say_what_is_imitated(tmp_path, label):
    config = _icot(**LABELS[label])
    config.reasoner = "text_gpt2"
    found = rows(build(config_checks.check(config), tmp_path))
    assert [(row.name, row.label) for row in found] == [("imitate", label)]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_latent_sft_goes_on_bit_for_bit(tmp_path, monkeypatch, rank):
    """Cut in a phase, and between two of them; each trains other parts, and the frozen ones stay what they are."""
    config = load_config()
    config.reasoner = "text_gpt2"
    config.gate.enabled = False
    config.stages = ("imitate",)
    config.latent_policy.name = "soft"
    config.max_answer_tokens = 6
    config.checkpoint_every = 3
    config.prompt.update(format="{question}\n<think>", closing="</ think>")
    config.imitate.update(
        recipe="latent_sft",
        c_thought=0,
        cot_steps=2,
        stage_steps=2,
        final_steps=3,
        control=False,
    )
    config.imitate.optimizer.update(warmup_steps=0, weight_decay=0.1)
    config.imitate.lora.rank = rank
    run_imitation(config, tmp_path / "whole")
    make = train_imitation.make_train_step
    seen = []

    def watched(*arguments, **settings):
        step_fn = make(*arguments, **settings)

        def step(state, batch):
            before = np.asarray(state.params["compress"]["embedding"])
            state, metrics = step_fn(state, batch)
            seen.append(
                (
                    int(state.step) - 1,
                    np.array_equal(before, state.params["compress"]["embedding"]),
                )
            )
            return state, metrics

        return step

    monkeypatch.setattr(train_imitation, "make_train_step", watched)
    crash_at(monkeypatch, train_imitation, 4, 7)
    for _ in range(2):
        with pytest.raises(Crash):
            run_imitation(config, tmp_path / "cut")
    run_imitation(config, tmp_path / "cut")
    assert_same_run(tmp_path / "cut", tmp_path / "whole", "imitate")
    assert {step for step, same in seen if not same} == {
        2,
        3,
        6,
        7,
    }  # the encoder's phases: alone, with the reasoner
    assert {step for step, same in seen if same} == {0, 1, 4, 5, 8, 9, 10}
