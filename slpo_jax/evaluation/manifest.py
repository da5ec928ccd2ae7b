"""What an evaluation depended on and what it wrote: `eval/ROW/SET.manifest`, by which stale or damaged results are
known.

A result is current if it was made by the same parameters, from the same problems, under the same settings, and its
files are to the byte what was written then. All four are digests, so that neither a path nor a step stands for them.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from slpo_jax.data.batches import EncodedProblems
from slpo_jax.io.files import digest, file_digest, write_text
from slpo_jax.io.workdir import SetFiles


@dataclasses.dataclass(frozen=True)
class Manifest:
    """One row's evaluation on one data set.

    Attributes:
        name: of the data set, by which noise is drawn.
        checkpoint: digest of the parameters.
        data: digest of the problems as loaded.
        prompts: digest of their token ids.
        problems: their number.
        settings: what else the results depend on, by key of the config, and how rollouts ended; a row has the same on
            all its sets.
        samples: rollouts under noise for each problem and seed.
        seeds: of these.
        scorers: of these.
        files: digests of the files that were written, by name.
        left_out: how many more problems the source has, whose answers can't be compared.
    """

    name: str
    checkpoint: str
    data: str
    prompts: str
    problems: int
    settings: Mapping[str, Any]
    samples: int = 0
    seeds: int = 0
    scorers: Sequence[str] = ()
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    left_out: int = 0

    @property
    def evaluation(self) -> str:
        """Digest of all but what was written."""
        return digest(dataclasses.asdict(dataclasses.replace(self, files={})))

    def same_evaluation(self, other: "Manifest") -> bool:
        """Whether both are of the same parameters, problems and settings, whatever was written."""
        return dataclasses.replace(self, files={}) == dataclasses.replace(other, files={})


def problems_digest(problems: EncodedProblems, limit: int) -> tuple[str, str, int]:
    """Digests of the first problems of a set as they were loaded, and of their prompts' token ids; their number.

    Args:
        problems: the set.
        limit: how many are used; 0 is all.
    """
    count = min(limit or len(problems), len(problems))
    texts = [[problem.question, problem.steps, problem.answer] for problem in problems.problems[:count]]
    return digest(texts), digest([list(map(int, prompt)) for prompt in problems.prompts[:count]]), count


def write_manifest(files: SetFiles, manifest: Manifest) -> None:
    """Writes the manifest of records that lie there, with the digests of these very files."""
    written = {path.name: file_digest(path) for path in (files.records, files.latents) if path.exists()}
    text = json.dumps(dataclasses.asdict(manifest) | {"files": written}, indent=1, sort_keys=True) + "\n"
    write_text(files.manifest, text)


def read_manifest(files: SetFiles) -> Manifest | None:
    """The manifest of a set's records; None where there is none that can be read, so that they are made again."""
    try:
        found = Manifest(**json.loads(files.manifest.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return found if isinstance(found.settings, dict) and isinstance(found.files, dict) else None


def is_whole(files: SetFiles, manifest: Manifest, latents: bool = False) -> bool:
    """Whether the files are to the byte what was written under the manifest.

    Args:
        latents: whether the latents must be there too.
    """
    wanted = {files.records.name} | ({files.latents.name} if latents else set())
    written = manifest.files.items()
    return wanted <= manifest.files.keys() and all(file_digest(files.folder / name) == value for name, value in written)
