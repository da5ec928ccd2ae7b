"""Published checkpoints that a test spoils, and how they must be refused."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from asked import edit
from published import safetensors, torch
from published_bases import config_of, copied, write_config
from refused import one_line
from slpo_jax.config import read_config
from slpo_jax.run.experiment import build


@dataclasses.dataclass
class Broken:
    """A checkpoint of which a test spoils something.

    Attributes:
        folder: holds it.
        settings: the config's keys.
    """

    folder: Path
    settings: dict

    @property
    def init(self) -> Path:
        return Path(self.settings["init"])

    def tensors(self, change: Callable[[dict], object]) -> None:
        """Change the tensors that are stored in the file, or the directory's only one."""
        path = self.init / "model.safetensors" if self.init.is_dir() else self.init
        if path.suffix == ".safetensors":
            state = safetensors.torch.load_file(path)
            change(state)
            safetensors.torch.save_file(state, path, metadata={"format": "pt"})
        else:
            state = torch.load(path)
            change(state)
            torch.save(state, path)

    def cut(self, name: str = "", keep: float = 0.6) -> None:
        """Truncate a file."""
        path = self.init / name
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * keep)])

    def gather_shards(self) -> None:
        """Make one file of the directory's shards."""
        shards = [
            safetensors.torch.load_file(path) for path in self.init.glob("model-*")
        ]
        state = {name: tensor for shard in shards for name, tensor in shard.items()}
        (self.init / "model.safetensors.index.json").unlink()
        safetensors.torch.save_file(state, self.init / "model.safetensors")

    def edit(self, file: str, **changes) -> None:
        """Change keys of a JSON file; None takes one out."""
        edit(self.folder / file, **changes)

    def refused(self, *parts: str) -> None:
        """Building the run fails in one line with these parts and a remedy, and writes nothing."""
        workdir = self.folder / "work"
        config = config_of(self.settings, self.folder)
        one_line(lambda: build(read_config(config), workdir).initial_params(), *parts)
        assert not workdir.exists()


def to_be_broken(folder: Path, write: Callable, *options) -> Broken:
    """A whole checkpoint in this folder."""
    write_config(folder)
    return Broken(folder, copied(folder, write, *options).settings)
