"""What `benchmarks/real.py` runs on SmolLM2-135M with CODI's six latents, in few programs, all counted.

Task gsm8k: GSM8K's own training set, and three published sets end to end to evaluate on. Task countdown: 20,000
demonstrations, then rewards by a verifier alone, on the device, on other problems; tests are apart from both. There is
one bucket of prompts and one capacity.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from slpo_jax.config import default_config, objective_variant
from slpo_jax.data.problems import load_problems
from slpo_jax.errors import UserError
from slpo_jax.io import artifact
from slpo_jax.io.files import write_text
from slpo_jax.io.workdir import Workdir
from slpo_jax.stages import COLD_START, CONTROL, EVALUATE, IMITATE, RL, USUAL, Section

TRAIN = "gsm8k_train.jsonl"
VALID = "gsm_valid.json"
SETS = {
    "gsm8k": "gsm_test.json",
    "multiarith": "multiarith.json",
    "svamp": "svamp.json",
}
TESTS = "tests"  # the three, end to end
Objectives = dict[str, tuple[str, dict[str, Any]]]
OBJECTIVES: dict[str, Objectives] = {  # by task
    "gsm8k": {
        "control": (
            "pathwise",
            {"estimator": "mixture", "mixture_weight": 0.0},
        ),  # the answers' likelihood, no reward
        "slpo": ("slpo", {"latent_reduction": "mean"}),
        "answer_only": ("answer_only", {}),
        "pathwise": ("pathwise", {}),
    },
    "countdown": {  # each in two halves, which are evaluated
        "answer_only_half": ("answer_only", {}),
        "answer_only": ("answer_only", {"after": "answer_only_half"}),
        "slpo_half": ("slpo", {"latent_reduction": "mean"}),
        "slpo": ("slpo", {"latent_reduction": "mean", "after": "slpo_half"}),
    },
}
TASKS = tuple(OBJECTIVES)
PARTS: dict[
    str, dict[str, tuple[Section, ...]]
] = {  # runs, one after the other, and stages whose programs are new
    "gsm8k": {"whole": USUAL},
    "countdown": {"imitation": (IMITATE,), "rewards": (RL, EVALUATE)},
}
BASELINES = {
    "gsm8k": ("control", "cold_start"),
    "countdown": (CONTROL, IMITATE, "answer_only"),
}
TINY: dict[str, Any] = {
    "max_latents": 2, "max_answer_tokens": 32, "model.dtype": "float32", "model.scan_layers": True,
    "imitate.batch_size": 4, "imitate.c_thought": 1, "imitate.max_latent_stage": 2, "imitate.max_tokens": 400,
    "imitate.cot_steps": 4, "imitate.final_steps": 4, "imitate.optimizer.warmup_steps": 1,
    "cold_start.batch_size": 4, "cold_start.steps": 2, "cold_start.evaluate_every": 2, "rl.batch_size": 4,
    "rl.group": 2, "rl.steps": 3, "rl.optimizer.warmup_steps": 1, "objective.slpo.passes": 2,
    "evaluate.batch_size": 32, "evaluate.limit": 12, "log_every": 1, "checkpoint_every": 2,
}  # fmt: skip
RANDOM: dict[str, dict[str, Any]] = {  # by task, where there are no weights to be tiny with
    task: {"tokenizer": "bytes", "model.n_layer": 1, "model.n_head": 2, "model.n_embd": 16, "model.n_positions": 1536,
           "prompt_slots": (slots,), "evaluate.prompt_multiple": slots, "max_answer_tokens": 40}
    for task, slots in (("gsm8k", 1024), ("countdown", 32))
}  # fmt: skip


def get_config(given: str):
    """The run's config.

    Args:
        given: JSON of task (of `TASKS`), part (of its `PARTS`), init (SmolLM2's file, or "" for random weights), train,
            valid and tests (files, of gsm8k), workdir, tiny, and micro_batches, which cut every program's batch.
    """
    asked = json.loads(given)
    config = default_config()
    task = asked["task"]
    config.reasoner = "codi_llama"
    config.init = asked["init"]
    config.update(max_latents=6, min_latents=1)
    config.imitate.update(
        batch_size=128, c_thought=2, max_latent_stage=3, final_latents="published"
    )
    config.imitate.optimizer.update(
        learning_rate=3e-4, warmup_steps=20, schedule="cosine", final_fraction=0.1
    )
    config.cold_start.update(batch_size=64, steps=60, evaluate_every=30, patience=2)
    config.cold_start.optimizer.update(name="adamw", learning_rate=3e-3)
    config.rl.update(
        batch_size=32, capacities=((1.0, 1.0),), objectives=tuple(OBJECTIVES[task])
    )
    config.rl.optimizer.update(name="adafactor", learning_rate=1e-5, warmup_steps=10)
    for name, (kind, settings) in OBJECTIVES[task].items():
        objective_variant(config, name, kind, **settings)
    config.evaluate.update(
        batch_size=1024, samples=16, seeds=1, thresholds=(0.5,), probed=0
    )
    config.update(trackers=(), log_every=10, checkpoint_every=50)
    {"gsm8k": _gsm8k, "countdown": _countdown}[task](config, asked)
    if asked["tiny"]:
        config.update_from_flattened_dict(
            TINY | ({} if asked["init"] else RANDOM[task])
        )
    for name in OBJECTIVES[task]:
        if task == "countdown":
            config.objective[name].steps = -(-config.rl.steps // 2)
    for stage in ("imitate", "cold_start", "rl"):
        config[stage].micro_batches = asked["micro_batches"]
    config.evaluate.batch_size //= asked["micro_batches"]
    return config


def starts(task: str) -> dict[str, str]:
    """Row -> the row that its training began from; imitation's began from SmolLM2."""
    first = COLD_START if task == "gsm8k" else IMITATE
    own = {
        name: settings.get("after", first)
        for name, (_, settings) in OBJECTIVES[task].items()
    }
    return {COLD_START: IMITATE, CONTROL: IMITATE} | own


def folder_of(workdir: Path, task: str, part: str) -> Workdir:
    """Where a part of the run lies: the last one in the workdir itself, the others in folders of it."""
    return Workdir(workdir if part == [*PARTS[task]][-1] else workdir / part)


def _gsm8k(config: ConfigDict, asked: Mapping[str, Any]) -> None:
    config.update(prompt_slots=(224,), max_answer_tokens=24)
    config.data.train = asked["train"]
    config.data.valid = asked["valid"]
    config.data.eval[TESTS] = asked["tests"]
    config.imitate.update(max_tokens=256, cot_steps=110, final_steps=220)
    config.rl.steps = 150
    config.evaluate.prompt_multiple = 224


def _countdown(config: ConfigDict, asked: Mapping[str, Any]) -> None:
    """Without a gate, whose cold start would make another start of imitation."""
    demonstrated = asked["part"] == "imitation"
    imitated = folder_of(Path(asked["workdir"]), "countdown", "imitation").stage_folder(
        IMITATE
    )
    config.stages = (IMITATE, EVALUATE) if demonstrated else (RL, EVALUATE)
    if not demonstrated:
        if imitated.is_finished:
            config.init = str(imitated.path)
        else:  # where programs are compiled before, the stage stands for what its checkpoint will have
            config.stages = (IMITATE, *config.stages)
    config.gate.enabled = False
    config.update(prompt_slots=(24,), max_answer_tokens=24)
    config.data.train = f"countdown:{'demos' if demonstrated else 'train'}"
    config.data.valid = "countdown:valid"
    for numbers in (3, 4):
        config.data.eval[f"numbers_{numbers}"] = f"countdown:{numbers}"
    few = asked["tiny"]
    config.data.countdown.update(demos_size=64 if few else 20_000, train_size=64 if few else 20_000,
                                 valid_size=8 if few else 500, test_size=8 if few else 1_000)  # fmt: skip
    config.imitate.update(cot_steps=300, final_steps=700, control=True)
    config.imitate.optimizer.update(learning_rate=2e-4, schedule="constant")
    config.rl.update(steps=400, temperature=1.0)
    config.evaluate.prompt_multiple = 24


# --- The three sets as one, and apart again.


def check_data(train: Path) -> list[Path]:
    """The data files: the training set, and the others beside it.

    Raises:
        UserError: one is missing.
    """
    files = [train, *(train.parent / name for name in (VALID, *SETS.values()))]
    for path in files:
        if not path.is_file():
            raise UserError(
                f"--train: {path}: no such file; give GSM8K's {TRAIN}, and put the other sets beside it"
            )
    return files


Spans = dict[str, dict[str, tuple[int, int]]]
"""An evaluated set's parts: first problem, and the one after the last, by the part's name."""


def join_sets(folder: Path, target: Path, most: int = 0) -> Spans:
    """Write the test sets one after the other.

    Args:
        most: problems of each; 0 is all.
    Returns:
        where each is in `TESTS`.
    Raises:
        UserError: one is missing, or can't be read.
    """
    lines: list[str] = []
    spans = {}
    for name, file in SETS.items():
        problems = load_problems(
            str(folder / file), default_config().data.synthetic, "test"
        )
        first = len(lines)
        for problem in problems[: most or None]:
            known = {"question": problem.question, "answer": problem.answer}
            lines.append(
                json.dumps(
                    known | ({"steps": list(problem.steps)} if problem.steps else {})
                )
            )
        spans[name] = (first, len(lines))
    text = "".join(f"{line}\n" for line in lines)
    if not target.exists() or target.read_text(encoding="utf-8") != text:
        write_text(target, text)
    return {TESTS: spans}


def part_sets(workdirs: Sequence[Workdir], apart: Workdir, spans: Spans) -> int:
    """Write the whole evaluations that workdirs have, set by set, where a report can be made of them; their number."""
    found = 0
    pairs = []
    for workdir in workdirs:
        pairs += [(workdir, *pair) for pair in workdir.list_evaluated()]
    for workdir, row, name in pairs:
        files = workdir.set_files(name, row)
        manifest = artifact.read(workdir.set_files(name, row).manifest)
        if manifest is None or artifact.find_changed(files.folder, manifest.files):
            continue
        found += 1
        lines = files.records.read_text(encoding="utf-8").splitlines(keepends=True)
        write_text(
            apart.row_facts(row), workdir.row_facts(row).read_text(encoding="utf-8")
        )
        for each, (first, end) in spans.get(name, {name: (0, len(lines))}).items():
            part = lines[first:end]
            if part:  # tiny ones may be cut
                write_text(apart.set_files(each, row).records, "".join(part))
                of_part = manifest.facts | {"set": each, "problems": len(part)}
                parted = apart.set_files(each, row)
                artifact.write(parted.manifest, of_part, files=[parted.records])
    logged = [
        each.metrics.read_text(encoding="utf-8")
        for each in workdirs
        if each.metrics.exists()
    ]
    if logged:
        write_text(apart.metrics, "".join(logged))
    return found
