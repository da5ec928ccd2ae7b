"""Every stage with a verifier on the host, in processes of its own, is what it is with the same one on the device."""

import pytest

import slpo_jax
from same_run import assert_same, checkpoint_of, rows_of
from slpo_jax.config.registry import read_registrations
from slpo_jax.rewards.reward import REWARDS
from small_run import CONFIG, new_folder, run

OWN = '''
import os
import signal
from pathlib import Path

import slpo_jax


def same(answer, completion):
    """1 where the number after the mark is the answer; it once ends the run that asks."""
    if Path("end").exists() and Path("host/checkpoints/imitate/finished").exists():
        Path("end").unlink()
        os.kill(os.getppid(), signal.SIGTERM)
    return float(completion.rpartition("#")[2].strip() == answer)


slpo_jax.register_reward("same", same)


def get_config():
    config = small()
    config.stages = ("imitate", "cold_start", "best_of_n", "rl", "latent_rm", "evaluate")
    config.imitate.control = False
    config.cold_start.update(micro_batches=2, steps=4, evaluate_every=2)
    config.best_of_n.update(samples=3, batch_size=4, micro_batches=2, steps=3)
    config.best_of_n.optimizer.warmup_steps = 0
    config.rl.steps = 3
    config.latent_rm.update(thoughts=4, completions=2, batch_size=2, dropout=0.9, steps=2, problems=24)
    config.latent_rm.optimizer.warmup_steps = 0
    config.evaluate.scorers = ("likelihood", "gate", "latent_rm")
    return config
'''
OF_HOST = ("unjudged", "reward_failed", "verifier_seconds", "verifier_share")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a run on the device, and of one on the host that was ended in its first step with verdicts, and went on."""
    found = new_folder(tmp_path_factory.mktemp("host"))
    (found / "own.py").write_text(CONFIG.replace("get_config", "small") + OWN)
    run("--config=own.py", "--workdir=device", folder=found)
    host = ("--config=own.py", "--workdir=host", "--config.reward=same", "--config.reward_processes=2")
    (found / "end").touch()
    assert "cold_start: interrupted at step 1" in run(*host, folder=found, status=143).stdout
    assert not (found / "end").exists()
    run(*host, "--config.reward_seconds=60", folder=found)
    return found


@pytest.mark.slow
def test_stages_are_the_same_to_the_bit(folder):
    device, host = (rows_of(folder / workdir) for workdir in ("device", "host"))
    judged = [row for row in host if "reward_failed" in row]
    assert {row["stage"] for row in judged} == {"cold_start", "best_of_n", "slpo"}
    assert not any(row["reward_failed"] for row in judged)
    assert any(0 < row["right_share"] < 1 for row in host if "right_share" in row)
    assert [{name: row[name] for name in row if name not in OF_HOST} for row in host] == device
    for stage in ("cold_start", "best_of_n", "slpo", "latent_rm"):
        assert_same(*(checkpoint_of(folder / workdir, stage) for workdir in ("device", "host")))
    for path in sorted((folder / "device" / "eval").glob("*/*.jsonl")):
        assert path.read_bytes() == (folder / "host" / path.relative_to(folder / "device")).read_bytes()


@pytest.mark.slow
def test_a_gate_of_verdicts_of_the_host_is_used(folder, request, tmp_path):
    read_registrations(str(folder / "own.py"))
    request.addfinalizer(lambda: REWARDS.pop("same"))
    asked, found = "Tom has 1 pens . He buys 2 . How many now ?", []
    for workdir in ("device", "host"):
        reasoner = slpo_jax.load(str(folder / workdir))
        reasoner.export(tmp_path / workdir)
        solved = reasoner.solve(asked, samples=3), slpo_jax.load(tmp_path / workdir).solve(asked)
        found.append([each.shown.partition("\n")[2] for each in solved])  # the first line has the place
    assert found[0] == found[1]
