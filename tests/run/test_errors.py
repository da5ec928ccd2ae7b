"""Bad input ends in status 2 and one line with the key or file and the remedy, and breaks nothing for the next run."""

import json
import socket
from types import SimpleNamespace

import pytest
from same_run import differences
from small_run import new_folder, run

from slpo_jax.config import default_config, read_config
from slpo_jax.errors import UserError
from slpo_jax.io.workdir import Workdir
from slpo_jax.run.sources import load_set
from slpo_jax.run.validate import check_prompts

ONE_STAGE = "--config.stages=('imitate',)"
SOFT = [
    ONE_STAGE, "--config.reasoner=text_gpt2", "--config.gate.enabled=False", "--config.imitate.c_thought=0",
    "--config.latent_policy.name=soft", "--config.imitate.control=False",
]  # fmt: skip
FEW_STEPS = [
    "--config.imitate.cot_steps=2", "--config.imitate.final_steps=2", "--config.imitate.control=False",
    "--config.evaluate.samples=0",
]  # fmt: skip
GOOD = '{"question": "Tom has 1 pens . How many now ?", "steps": ["1 + 2 = 3"], "answer": "3"}\n'
LONG = json.dumps({"question": "Tom has 1 pens . " + "He buys 2 . " * 4 + "How many now ?", "answer": "9"}) + "\n"
WORDY = json.dumps({"question": "Tom has 1 pens .", "steps": ["1 + 2 = 3"] * 7, "answer": "3"}) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = new_folder(tmp_path_factory.mktemp("errors"))
    files = {
        "broken.jsonl": GOOD + '{"question": "Tom has\n',
        "nonumber.jsonl": GOOD + GOOD.replace('"3"', '"three"'),
        "noanswer.json": '[{"question": "Tom has 1 pens ."}]',
        "barless.txt": "Tom has 1 pens . || #### 3\nTom has 2 pens .\n",
        "empty.jsonl": "",
        "long.jsonl": GOOD * 3 + LONG,
        "wordy.jsonl": GOOD + WORDY,
        "unknown.jsonl": GOOD.replace("pens", "zebras"),
        "pens.xlsx": "question,answer\n",
        "surrogate.jsonl": GOOD.replace("Tom", "Tom \\ud800"),
        "typo.py": "from small import get_config as small\n\n\ndef get_config():\n    config = small()\n"
        "    config.rl.stepz = 3\n    return config\n",
        "syntax.py": "def get_config(:\n",
        "raises.py": "def get_config():\n    raise ValueError('no more')\n",
        "unread.py": "def get_config():\n    return open('not_there.txt')\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "typo.py").write_text("import sys; sys.path.insert(0, '.')\n" + files["typo.py"])
    return folder


def _error_of(done) -> str:
    """The one line, after checks that hold for every error."""
    assert done.status == 2, done.stderr
    *before, line = done.stderr.splitlines()  # the header, and what was done before
    assert "error" not in "".join(before)
    assert line.startswith("error: ")
    assert len(line) < 400
    assert "Traceback" not in done.stderr + done.stdout
    return line.removeprefix("error: ")


FLAGS = {
    "unknown key": (["--config.nosuch=1"], "config.nosuch: unknown config key", "stages"),
    "unknown nested key": (["--config.rl.stepz=1"], "config.rl.stepz: unknown config key", "steps"),
    "unknown section": (["--config.none.steps=1"], "config.none.steps: unknown config key", ""),
    "unknown flag": (["--wrokdir=x"], "wrokdir", ""),
    "a word for a number": (["--config.rl.group=many"], "config.rl.group: 'many'", "number, 2 or more"),
    "a speed between two": (["--config.prompt.speed=2.5"], "config.prompt.speed: '2.5'", "whole number from 1 to 5"),
    "None for a number": (["--config.rl.group=None"], "config.rl.group: None", "number, 2 or more"),
    "None where it can be": (["--config.rl.optimizer.clip_norm=None", "--config.rl.group=1"], "config.rl.group: 1", ""),
    "G": (["--config.rl.group=1"], "config.rl.group: 1", "2 or more; fewer give no baseline"),
    "capacities": (["--config.rl.capacities=((0.5, 0.5), (0.4, 1.0))"], "config.rl.capacities", "ascend to (1, 1)"),
    "K": (["--config.objective.slpo.passes=0"], "config.objective.slpo.passes", "1 or more"),
    "T_min > T_max": (["--config.min_latents=4"], "config.min_latents: 4", "max_latents (3)"),
    "T": (["--config.max_latents=-1"], "config.max_latents: -1", "0 or more"),
    "no thought, and a gate": (["--config.max_latents=0"], "config.gate.enabled", "False"),
    "a stage": (["--config.stages=('imitate','slpo')"], "config.stages: ('imi", "imitate, cold_start, rl, latent_rm"),
    "no stage": (["--config.stages=()"], "config.stages", "imitate"),
    "a process of how many": (["--process=0", "--processes=2"], "--coordinator: goes with", "give all three"),
    "a coordinator alone": (["--coordinator=node1:1234"], "--coordinator: goes with", "give all three"),
    "a coordinator without a port": (
        ["--coordinator=node1", "--process=0", "--processes=2"],
        "--coordinator: node1 is no HOST:PORT",
        "node1:1234",
    ),
    "a process too many": (
        ["--coordinator=node1:1234", "--process=2", "--processes=2"],
        "--process: 2 is none of the 2",
        "count from 0",
    ),
    "no process": (
        ["--coordinator=node1:1234", "--process=0", "--processes=0"],
        "--processes=0: is not valid",
        "a positive integer",
    ),
    "a port that there is none of": (
        ["--coordinator=node1:70000", "--process=0", "--processes=1"],
        "--coordinator: there is no port 70000",
        "from 1 to 65535",
    ),
    "an empty workdir": (["--workdir="], "--workdir: is empty", "leave it out"),
    "a stage twice": (["--config.stages=('rl','rl')"], "config.stages: ('rl', 'rl')", "at most once"),
    "a stage too early": (["--config.stages=('rl','imitate')"], "config.stages: ('rl', 'im", "imitate, cold_start, rl"),
    "a set called as a mean": (["--config.data.eval.average=real.json"], "config.data.eval.average", "another name"),
    "a set to evaluate": (
        ["--config.evaluate.datasets=('real','svamp')"],
        "config.evaluate.datasets: 'svamp'",
        "data.eval",
    ),
    "the gate off, and trained": (["--config.gate.enabled=False"], "config.gate.enabled", "config.stages"),
    "the latents of the last stage": (["--config.imitate.c_thought=4"], "config.imitate.c_thought: 4", "max_latents"),
    "text that is imitated with latents": (
        [
            "--config.reasoner=text_gpt2",
            "--config.gate.enabled=False",
            "--config.latent_policy.name=soft",
            "--config.imitate.max_latent_stage=0",
            "--config.imitate.c_thought=1",
        ],
        "config.imitate.c_thought: 1 latents a step",
        "set it to 0",
    ),
    "text with latents": (
        ["--config.reasoner=text_gpt2", "--config.imitate.c_thought=0"],
        "config.max_latents: 3, but text_gpt2 has no latents for config.latent_policy.name=latent",
        "soft, noisy_soft, gumbel, gumbel_top_k, hybrid",
    ),
    "a prompt for a reasoner that has its own": (
        ["--config.prompt.instruction=Go"],
        "config.prompt.instruction: coconut_gpt2",
        "text_llama",
    ),
    "a prompt without its question": (["--config.prompt.format=Go"], "config.prompt.format: 'Go'", "{question} once"),
    "a prompt of two sorts": (
        ["--config.prompt.format={question}", "--config.prompt.system=Go"],
        "config.prompt.format: '{question}'",
        "put system and instruction into it",
    ),
    "two ends of a thought": (
        [*SOFT, "--config.latent_policy.soft.end_text=now", "--config.prompt.closing=</think>"],
        "config.prompt.closing: '</think>'",
        "leave one of them out",
    ),
    "Latent-SFT without an end of thoughts": (
        [*SOFT, "--config.imitate.recipe=latent_sft"],
        "config.prompt.closing: latent_sft",
        "give e.g. </think>",
    ),
    "Latent-SFT of latents": (
        ["--config.imitate.recipe=latent_sft", "--config.imitate.control=False"],
        "config.imitate.recipe: latent_sft",
        "text_llama",
    ),
    "answers of a reasoner that has its own": (
        ["--config.prompt.answers=boxed", "--config.stages=('imitate','evaluate')"],
        "config.prompt.answers: coconut_gpt2",
        "text_llama",
    ),
    "a prompt beside answers that are texts": (
        ["--config.prompt.answers=texts", "--config.prompt.instruction=Go", ONE_STAGE],
        "config.prompt.instruction: coconut_gpt2",
        "text_llama",
    ),
    "answers in no known way": (["--config.prompt.answers=math"], "config.prompt.answers: 'math'", "boxed"),
    "text with a gate": (
        ["--config.reasoner=text_gpt2", "--config.imitate.c_thought=0", "--config.latent_policy.name=soft"],
        "config.gate.enabled: True",
        "set it to False",
    ),
    "text that is not written": (
        ["--config.reasoner=text_gpt2"],
        "config.imitate.c_thought: 1 latents a step",
        "set it to 0",
    ),
    "log_every": (["--config.log_every=0"], "config.log_every", "1 or more"),
    "checkpoint_every": (["--config.checkpoint_every=0"], "config.checkpoint_every", "1 or more"),
    "a batch of nothing": (["--config.cold_start.batch_size=0"], "config.cold_start.batch_size", "1 or more"),
    "no threshold": (["--config.evaluate.thresholds=()"], "config.evaluate.thresholds", "(0.5, 0.6"),
    "dropout": (["--config.dropout.rate=1.0"], "config.dropout.rate: 1.0", "below 1"),
    "a term": (["--config.objective.slpo.advantage=ppo"], "config.objective.slpo.advantage: 'ppo'", "rloo, grpo, pkpo"),
    "reasoner": (["--config.reasoner=gpt5"], "config.reasoner: 'gpt5'", "coconut_gpt2"),
    "tokenizer": (["--config.tokenizer=./nowhere"], "config.tokenizer: ./nowhere", "synthetic:N"),
    "positions": (["--config.model.n_positions=26"], "config.model.n_positions: 26 is less than the 27", "raise it"),
    "heads": (["--config.model.n_head=3"], "config.model.n_embd", "n_head"),
    "no devices to share a batch": (["--config.rl.batch_size=5"], "config.rl.batch_size: 5", "2 devices"),
    "micro-batches": (["--config.imitate.micro_batches=3"], "config.imitate.batch_size: 8", "3 micro-batches"),
    "a stray argument": (["stages=imitate"], "stages=imitate: is no flag", "--config.KEY=VALUE"),
    "no heads": (["--config.model.n_head=0"], "config.model.n_head: 0", "1 or more"),
    "fewer than no heads": (["--config.model.n_head=-2"], "config.model.n_head: -2", "1 or more"),
    "no layer": (["--config.model.n_layer=0"], "config.model.n_layer: 0", "1 or more"),
    "a word for a bucket": (["--config.prompt_slots=('a',)"], "config.prompt_slots: ('a',)", "(128, 256)"),
    "a seed beyond 64 bits": ([f"--config.seed={2**64}"], "config.seed: 18446744073709551616", "4294967295"),
    "a negative seed": (["--config.seed=-1"], "config.seed: -1", "from 0"),
    "imitation's dropout": (["--config.imitate.dropout=1.5"], "config.imitate.dropout: 1.5", "below 1"),
    "imitation's dropout, nan": (["--config.imitate.dropout=nan"], "config.imitate.dropout: nan", "below 1"),
    "the gate's dropout": (["--config.gate.dropout=-1.0"], "config.gate.dropout: -1.0", "from 0 to below 1"),
    "samples": (["--config.evaluate.samples=-1"], "config.evaluate.samples: -1", "0 is Acc alone"),
    "limit": (["--config.evaluate.limit=-3"], "config.evaluate.limit: -3", "0 is all"),
    "seeds": (["--config.evaluate.seeds=0"], "config.evaluate.seeds: 0", "1 or more"),
    "steps": (["--config.rl.steps=-5"], "config.rl.steps: -5", "1 or more"),
    "a word for a threshold": (["--config.evaluate.thresholds=('a',)"], "config.evaluate.thresholds: ('a',)", "0 to 1"),
    "a threshold": (["--config.evaluate.thresholds=(7.0,)"], "config.evaluate.thresholds: (7.0,)", "from 0 to 1"),
    "temperature": (["--config.rl.temperature=-1.0"], "config.rl.temperature: -1.0", "0 or more"),
    "temperature, nan": (["--config.rl.temperature=nan"], "config.rl.temperature: nan", "0 or more"),
    "epsilon": (["--config.objective.slpo.epsilon=0.0"], "config.objective.slpo.epsilon: 0.0", "above 0"),
    "epsilon below 0": (["--config.objective.slpo.epsilon=-1.0"], "config.objective.slpo.epsilon: -1.0", "above 0"),
    "a weight": (["--config.objective.slpo.latent_weight=nan"], "config.objective.slpo.latent_weight: nan", "number"),
    "latents a step": (["--config.imitate.c_thought=-1"], "config.imitate.c_thought: -1", "0 or more"),
    "warm-up": (["--config.rl.optimizer.warmup_steps=7"], "config.rl.optimizer.warmup_steps: 7", "6 steps"),
    "warm-up of a phase": (
        ["--config.imitate.cot_steps=1", "--config.imitate.optimizer.warmup_steps=2"],
        "config.imitate.optimizer.warmup_steps: 2",
        "1 steps",
    ),
    "an objective": (["--config.rl.objectives=('ppo',)"], "config.rl.objectives: 'ppo'", "slpo"),
    "a latent policy": (["--config.latent_policy.name=free"], "config.latent_policy.name: 'free'", "latent, additive"),
    "its noise": (["--config.latent_policy.additive.sigma=0.0"], "config.latent_policy.additive.sigma: 0.0", "above 0"),
    "a thought without a likelihood": (["--config.rl.objectives=('exact',)"], "config.objective.exact", "additive"),
    "k of pkpo": (
        ["--config.objective.slpo.advantage=pkpo", "--config.objective.slpo.pass_k=5"],
        "config.objective.slpo.pass_k: 5",
        "the 4 that pkpo can take of config.rl.group=4",
    ),
    "an optimizer": (["--config.rl.optimizer.name=sgd"], "config.rl.optimizer.name: 'sgd'", "adafactor, adamw"),
    "nothing to train": (
        [f"--config.objective.slpo.{name}_weight=0.0" for name in ("latent", "answer", "stop")],
        "config.objective.slpo",
        "set one",
    ),
    "nothing to evaluate": (["--config.stages=('evaluate',)"], "config.init", "give a checkpoint"),
    "no checkpoint": (
        ["--config.stages=('evaluate',)", "--config.init=./nowhere"],
        "config.init",
        "WORKDIR/checkpoints/STAGE",
    ),
    "no steps": (
        [ONE_STAGE, "--config.imitate.cot_steps=0", "--config.imitate.final_steps=0"],
        "config.imitate.final_steps",
        "give some",
    ),
    "no data": ([ONE_STAGE, "--config.data.train="], "config.data.train: not set", "synthetic:train"),
    "a missing file": (
        ["--config.data.train=nowhere.jsonl"],
        "config.data.train: nowhere.jsonl: no such file",
        "check the path",
    ),
    "a missing file of a later stage": (
        ["--config.data.eval.real=nowhere.json"],
        "config.data.eval.real: nowhere.json: no such file",
        "check the path",
    ),
    "a missing file under a name of one's own": (
        ["--config.data.eval.mine=nowhere.json"],
        "config.data.eval.mine: nowhere.json: no such file",
        "check the path",
    ),
    "a set without a source": (["--config.data.eval.mine"], "config.data.eval.mine: not set", "give a file"),
    "an empty source": (["--config.data.eval.mine="], "config.data.eval.mine: not set", "give a file"),
    "a missing validation file": (["--config.data.valid=nowhere.txt"], "nowhere.txt: no such file", "check the path"),
    "a kind of file": (["--config.data.train=pens.xlsx"], "config.data.train: pens.xlsx", ".jsonl"),
    "a broken line": (["--config.data.train=broken.jsonl"], "config.data.train: broken.jsonl, line 2", "mend"),
    "an answer that is no number": (
        ["--config.data.train=nonumber.jsonl"],
        "nonumber.jsonl, line 2: answer 'three'",
        "write digits",
    ),
    "a record without answer": (
        ["--config.data.train=noanswer.json"],
        "noanswer.json, record 1: field 'answer'",
        "config.data.fields.answer",
    ),
    "half a character": (
        ["--config.data.train=surrogate.jsonl"],
        "config.data.train: surrogate.jsonl: 'Tom \\ud800",
        "UTF-8",
    ),
    "a line without bars": (["--config.data.train=barless.txt"], "barless.txt, line 2", "question||steps #### answer"),
    "an empty set": (["--config.data.train=empty.jsonl"], "config.data.train: empty.jsonl", "at least one"),
    "a synthetic set": (["--config.data.train=synthetic:nosuch"], "synthetic:nosuch", "train"),
    "a set that is all in valid": (["--config.data.train=valid.txt"], "config.data.train", "config.data.valid"),
    "an unknown word": (["--config.data.train=unknown.jsonl"], "config.data.train: unknown.jsonl: ", "tokenizer"),
    "a problem longer than the slots": (
        ["--config.data.train=long.jsonl"],
        "config.data.train: problem 3 has a prompt of 27",
        "config.prompt_slots",
    ),
    "steps longer than the positions": (
        ["--config.data.train=wordy.jsonl"],
        "config.model.n_positions: 40 is less than the",
        "phase cot",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FLAGS)
def test_one_line_and_nothing_else(folder, case):
    arguments, key, remedy = FLAGS[case]
    line = _error_of(run("--config=small.py", f"--workdir=work/{case.replace(' ', '_')}", *arguments, folder=folder))
    assert key in line
    assert remedy in line


CONFIGS = {
    "nowhere.py": ("--config=nowhere.py: no such file", "quickstart"),
    ".": ("--config=.: a directory", "quickstart"),
    "typo.py": ("stepz", "mend the file"),
    "syntax.py": ("--config=syntax.py", "invalid syntax"),
    "raises.py": ("--config=raises.py", "no more"),
    "unread.py": ("--config=unread.py", "not_there.txt"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_bad_config_files(folder, name):
    line = _error_of(run(f"--config={name}", "--workdir=work/config", folder=folder))
    assert all(part in line for part in CONFIGS[name])


def test_a_workdir_that_is_a_file(folder):
    done = run("--config=small.py", "--workdir=small.py", folder=folder)
    assert "--workdir=small.py: is no directory" in _error_of(done)


def test_a_workdir_that_another_run_works_in(folder):
    """Refused while the other lives, whose files stay as they are; whoever comes after it is let in."""
    workdir = Workdir(folder / "work" / "shared")
    workdir.root.mkdir(parents=True)
    with workdir.in_use():
        line = _error_of(run("--config=small.py", "--workdir=work/shared", folder=folder))
        assert line.startswith("--workdir=work/shared: another run is at work in it")
        assert [path.name for path in workdir.root.iterdir()] == [workdir.lock.name]
    with workdir.in_use():
        pass


def test_a_coordinator_s_port_that_another_program_has(folder):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        done = run(
            "--config=small.py", f"--coordinator=localhost:{port}", "--processes=2", "--process=0", folder=folder
        )
    assert _error_of(done).startswith(f"--coordinator: port {port} can't be had (")


def test_no_config(folder):
    assert "--config: not given" in _error_of(run("--workdir=work/config", folder=folder))


def test_long_problem_of_an_evaluation_set(folder):
    """It is found before the first stage."""
    (folder / "long.json").write_text(json.dumps([json.loads(line) for line in (GOOD * 3 + LONG).splitlines()]))
    text = (folder / "small.py").read_text().replace("real.json", "long.json")
    (folder / "long.py").write_text(text)
    line = _error_of(run("--config=long.py", "--workdir=work/long", folder=folder))
    assert "config.data.eval.real: problem 3 has a prompt of 27 tokens" in line
    assert not (folder / "work" / "long" / "checkpoints").exists()  # nothing was trained before that


def test_long_problem_of_slots_that_the_positions_cut():
    """A larger bucket would be cut as well."""
    config = default_config()
    config.prompt_slots = (24,)
    problems = SimpleNamespace(prompts=[[0] * 12, [0] * 22])
    with pytest.raises(UserError, match=r"22 tokens, more than the 12 positions .*; lower config.max_latents or"):
        check_prompts(config, "config.data.train", problems, 12)
    config.prompt_slots = (20,)
    with pytest.raises(UserError, match=r"22 tokens, more than the 20 of config\.prompt_slots; add a larger bucket"):
        check_prompts(config, "config.data.train", problems, 20)


def test_debug_shows_where(folder):
    done = run("--config=small.py", "--workdir=work/debug", "--config.rl.group=1", "--debug", folder=folder)
    assert done.status != 0
    assert "Traceback" in done.stderr
    assert "config.rl.group" in done.stderr


@pytest.mark.slow
def test_a_failed_run_binds_nobody(folder):
    """The right command, in the workdir in which the wrong one failed, begins as in a new one."""
    assert (
        run("--config=small.py", "--workdir=work/again", "--config.imitate.micro_batches=3", folder=folder).status == 2
    )
    assert run("--config=small.py", "--workdir=work/again", "--config.data.train=long.jsonl", folder=folder).status == 2
    done = run("--config=small.py", "--workdir=work/again", ONE_STAGE, *FEW_STEPS, folder=folder)
    assert done.status == 0, done.stderr
    before = (folder / "work" / "again" / "config.json").read_text()
    # Nor does a wrong one afterwards do harm.
    wrong = run("--config=small.py", "--workdir=work/again", ONE_STAGE, *FEW_STEPS, "--config.seed=3", folder=folder)
    assert "config.seed: " in _error_of(wrong)
    assert (folder / "work" / "again" / "config.json").read_text() == before


def test_sets_are_read_before_anything_is_trained(folder):
    """The last stage's, whichever key they stand under; what they hold is checked, not just that they are there."""
    for number, source in enumerate(("nowhere.json", "broken.jsonl", "long.jsonl")):
        workdir = f"work/read_{number}"
        flags = ["--config=small.py", f"--workdir={workdir}", f"--config.data.eval.mine={source}"]
        line = _error_of(run(*flags, folder=folder))
        assert line.startswith("config.data.eval.mine: ")
        assert not (folder / workdir / "checkpoints").exists()
        assert not (folder / workdir / "config.json").exists()


@pytest.mark.slow
def test_a_set_of_one_s_own_is_evaluated(folder):
    """Its name is not in the config file; both ways to write a flag."""
    (folder / "mine.jsonl").write_text(GOOD * 2)
    both = "--config.stages=('imitate','evaluate')"
    sets = ["--config.data.eval.mine=mine.jsonl", "--config.data.eval.other", "mine.jsonl"]
    chosen = "--config.evaluate.datasets=('mine','other')"
    done = run("--config=small.py", "--workdir=work/mine", both, *FEW_STEPS, *sets, chosen, folder=folder)
    assert done.status == 0, done.stderr
    report = json.loads((folder / "work" / "mine" / "report.json").read_text())
    assert {name: figures["n"] for name, figures in report["eval"]["imitate"].items()} == {"mine": 2, "other": 2}
    config = json.loads((folder / "work" / "mine" / "config.json").read_text())
    assert config["data"]["eval"]["mine"] == "mine.jsonl"
    assert "\r" not in done.stderr  # a log file gets lines
    lines = done.stderr.splitlines()
    assert [number for number, line in enumerate(lines) if "workdir work/mine" in line] == [0]
    assert "model: coconut_gpt2, 5,265 parameters" in lines
    assert "imitate: begins at step 0 of 4" in lines
    assert any(line.startswith("imitate: 4/4 steps") for line in lines)
    assert [line for line in lines if line.startswith("evaluate: ")]
    said = done.stderr.index("config.data.train: 136 problems, 1.0 steps each, answers are numbers")
    assert said < done.stderr.index("imitate: ")


@pytest.mark.slow
def test_a_finished_stage_needs_no_training_data(folder):
    """A workdir can be evaluated where the data that it was trained on is not."""
    copied = folder / "copied.jsonl"
    copied.write_text((folder / "train.jsonl").read_text())
    flags = ["--config=small.py", "--workdir=work/moved", *FEW_STEPS, "--config.data.train=copied.jsonl"]
    assert run(*flags, ONE_STAGE, folder=folder).status == 0
    copied.unlink()
    done = run(*flags, "--config.stages=('imitate','evaluate')", folder=folder)
    assert done.status == 0, done.stderr


FILLING = """
import pathlib
import resource
import threading
import time


def _fill():
    while not pathlib.Path("work/checkpoints/imitate/2/checksums.json").exists():
        time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


if pathlib.Path("fills").exists():
    threading.Thread(target=_fill, daemon=True).start()
"""


@pytest.mark.slow
def test_a_disk_that_fills_during_a_save(tmp_path):
    """No file can grow beyond some bytes any more after the first checkpoint; it stays, and is gone on from."""
    folder, flags = new_folder(tmp_path), ["--config.imitate.control=False", "--config.model.n_embd=64", ONE_STAGE]
    flags += ["--config.log_every=3", "--config.checkpoint_every=2", "--config.imitate.cot_steps=0"]
    with (folder / "small.py").open("a") as file:
        file.write(FILLING)
    (folder / "fills").touch()
    error = _error_of(run("--config=small.py", "--workdir=work", *flags, folder=folder))
    assert error.endswith(
        "work/checkpoints/imitate: the checkpoint can't be written (File too large); make room, and the same command "
        "goes on from the one before"
    )
    assert Workdir(folder / "work").stage("imitate").steps
    (folder / "fills").unlink()
    for workdir in ("work", "whole"):
        assert run("--config=small.py", f"--workdir={workdir}", *flags, folder=folder).status == 0
    assert differences(folder / "work", folder / "whole") == []


def test_no_records():
    with pytest.raises(UserError, match=r"^problems: is empty; give at least one record$"):
        load_set(read_config(default_config()), "problems", [])
