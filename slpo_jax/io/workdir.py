"""Where everything of a run lies on the disk; no other file spells these names.

WORKDIR/
  config.json  metrics.jsonl  tensorboard/  trackers.json  report.json  report.md  report.html  .lock
  data/NAME.jsonl                           records that a call of `slpo_jax.train` gave
  failed_STAGE_STEP.npz                     the batch of a step that was not finite
  checkpoints/
    reasoner/                               what the checkpoints are: shapes, texts, tokenizer
    STAGE/  config.json  finished  STEP/    the whole config that the stage ran by, its last step, its states
            inputs.json                     digests of what else it depends on: data, start, code of rewards
            rule.json                       the threshold or number of latents that was chosen for it
            adapters/                       that were trained, as PEFT saves them; STEP/ has them merged
    STAGE.digest.json                       of the stage's parameters
  labels/  manifest.json  NUMBER.npz        of the stage latent_rm's thoughts
  eval/
    SET.jsonl                               the last row's records
    ROW/  row.json  SET.jsonl  SET.latents.npz  SET.thoughts.json  SET.manifest
    ROW/{SET,rule}.partial/                 rollouts of an evaluation, or of a choice, that is not finished
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slpo_jax.errors import UserError
from slpo_jax.io.files import digest, entries, read_json
from slpo_jax.runtime import hosts
from slpo_jax.stages import RL, section_of

REASONER_FOLDER = "reasoner"
_CHECKPOINTS = "checkpoints"


class SetFiles:
    """The files that one row's evaluation on one data set leaves behind.

    Attributes:
        folder: of the row.
        name: of the data set.
        records: a JSON line a problem.
        latents: the clean rollouts' latents, where they were asked for.
        thoughts: views of the first problems' latents.
        manifest: the facts that the records were made of, and digests.
        partial: folder of the rollouts that are finished while others are not.
    """

    def __init__(self, folder: Path, name: str):
        self.folder = folder
        self.name = name
        self.records = folder / f"{name}.jsonl"
        self.latents = folder / f"{name}.latents.npz"
        self.thoughts = folder / f"{name}.thoughts.json"
        self.manifest = folder / f"{name}.manifest"
        self.partial = folder / f"{name}.partial"

    def copy_to(self, target: "SetFiles") -> None:
        """Copy the records, and the latents if there are any; of several processes the first does so."""
        if not hosts.is_first():
            return
        target.folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.records, target.records)
        target.latents.unlink(missing_ok=True)
        if self.latents.exists():
            shutil.copyfile(self.latents, target.latents)


class StageFolder:
    """The folder of one stage's checkpoints.

    Attributes:
        path: WORKDIR/checkpoints/STAGE.
        name: the stage's.
        config: the whole config that the stage ran by.
        inputs: the stage's further dependencies: digests of its data, its start and its rewards' code.
        finished: the stage's last step; there once the stage was run to its end.
        rule: how its rollouts stop, see `evaluation.report_rows.write_rule`.
        adapters: folder of the adapters that it has merged.
        anew: the remedy for a folder that can't be used.
    """

    def __init__(self, path: Path):
        self.path = path
        self.name = path.name
        self.config = path / "config.json"
        self.inputs = path / "inputs.json"
        self.finished = path / "finished"
        self.rule = path / "rule.json"
        self.adapters = path / "adapters"
        self.anew = f"delete {path} to run the stage anew, or use another --workdir"

    @classmethod
    def of(cls, checkpoint: Path) -> "StageFolder":
        """Return the folder around a checkpoint: itself, or of one step's directory the folder that it is in."""
        is_step = checkpoint.name.isdecimal()
        return cls(checkpoint.parent if is_step else checkpoint)

    @property
    def workdir(self) -> "Workdir | None":
        """The workdir around it; None for a checkpoint that lies alone."""
        folder = self.path.parent
        if folder.name != _CHECKPOINTS:
            return None
        return Workdir(folder.parent)

    @property
    def is_finished(self) -> bool:
        """Whether the stage was run to its end."""
        return self.finished.is_file()

    def read_config(self) -> dict[str, Any]:
        """Read the config that the stage ran by.

        Raises:
            UserError: it is not there, or damaged.
        """
        return read_json(self.config, self.anew)

    def read_inputs(self) -> dict[str, Any]:
        """Read the digests of the stage's further dependencies.

        Raises:
            UserError: it is not there, or damaged.
        """
        return read_json(self.inputs, self.anew)

    def digest(self) -> str:
        """Return the digest of all that the stage was run with, by which its rule is known as its own."""
        config = self.read_config()
        inputs = self.read_inputs() if self.inputs.is_file() else {}
        return digest([config, inputs])

    @property
    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, ascending."""
        # Other entries are its files, and folders that Orbax has not finished.
        steps: list[int] = []
        for entry in entries(self.path):
            if entry.name.isdecimal():
                steps.append(int(entry.name))
        return sorted(steps)


class Workdir:
    """The paths of a run's workdir. Nothing is made or read by asking for one.

    Attributes:
        root: the workdir.
        config: the config of the last command, resolved.
        metrics: a JSON line a logged step: means since the line before.
        tensorboard: folder of TensorBoard's events.
        trackers: the name of this workdir's run, by tracker.
        report_json, report_md, report_html: the report.
        lock: locked by the run that is at work here, for as long as it lives.
        checkpoints: folder of the stages' folders.
        reasoner: folder that describes the reasoner of all checkpoints.
        labels: folder of the labels that the stage latent_rm is trained on.
        eval: folder of the rows' folders.
    """

    def __init__(self, root: Path):
        self.root = root
        self.config = root / "config.json"
        self.metrics = root / "metrics.jsonl"
        self.tensorboard = root / "tensorboard"
        self.trackers = root / "trackers.json"
        self.report_json = root / "report.json"
        self.report_md = root / "report.md"
        self.report_html = root / "report.html"
        self.lock = root / ".lock"
        self.checkpoints = root / _CHECKPOINTS
        self.reasoner = self.checkpoints / REASONER_FOLDER
        self.labels = root / "labels"
        self.eval = root / "eval"

    def __str__(self) -> str:
        return str(self.root)

    def failed_batch(self, stage: str, step: int) -> Path:
        """Return the file of the batch of the step at which a run gave up on a stage."""
        return self.root / f"failed_{stage}_{step}.npz"

    def records(self, name: str) -> Path:
        """Return the file of a set's records, where they were given to a call."""
        return self.root / "data" / f"{name}.jsonl"

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep other runs from working in it; of several processes of one run the first does so.

        Raises:
            UserError: somebody is at work here.
        """
        import filelock

        # A lock is the operating system's, so that it ends with its process.
        if not hosts.is_first():
            yield
            return
        try:
            with filelock.FileLock(self.lock, timeout=0):
                yield
        except filelock.Timeout:
            raise UserError(
                f"--workdir={self}: another run is at work in it; wait for its end, or use another --workdir"
            ) from None

    def stage_folder(self, name: str) -> StageFolder:
        """Return the folder of a stage, whether it is there or not."""
        return StageFolder(self.checkpoints / name)

    def digest(self, stage: str) -> Path:
        """Return the file of the digest of a stage's parameters; without a stage, of the run's start."""
        name = stage or "init"
        return self.checkpoints / f"{name}.digest.json"

    def finished_stages(self) -> list[str]:
        """List the stages that were run to their end, by name."""
        names: list[str] = []
        for path in entries(self.checkpoints):
            stage = StageFolder(path)
            if stage.is_finished:
                names.append(stage.name)
        return sorted(names)

    def finished_objectives(self) -> list[str]:
        """List those of the finished stages that the stage rl made."""
        return [name for name in self.finished_stages() if section_of(name) == RL]

    def row(self, name: str) -> Path:
        """Return the folder of a row's records."""
        return self.eval / name

    def sweep(self, row: str) -> Path:
        """Return the folder of the rollouts that are finished while the row's rule is being chosen."""
        return self.row(row) / "rule.partial"

    @property
    def times(self) -> Path:
        """The file of how long the rows' answers take."""
        return self.eval / "times.json"

    def row_facts(self, name: str) -> Path:
        """Return the file of the row's own facts."""
        return self.row(name) / "row.json"

    def set_files(self, name: str, row: str = "") -> SetFiles:
        """Return the files of a data set, of a row, or without one the last row's that lie in `eval` itself."""
        return SetFiles(self.eval / row, name)

    def list_evaluated(self) -> list[tuple[str, str]]:
        """List (row, data set) of all evaluations, by name; their records may be gone."""
        # An evaluation has left records, or at least what they were made of.
        found = set[tuple[str, str]]()
        for row in entries(self.eval):
            for path in entries(row):
                if path.suffix in (".jsonl", ".manifest"):
                    found.add((row.name, path.stem))
        return sorted(found)
