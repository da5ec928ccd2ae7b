"""What messages call a setting: commands have flags for keys of the config, Python calls have arguments."""

import contextlib
import contextvars
import re
from collections.abc import Iterator, Mapping

from slpo_jax.config.load_options import KEYS
from slpo_jax.errors import UserError

_inside = contextvars.ContextVar("inside", default=False)

# Of `slpo_jax.load` by key of the config.
_ARGUMENTS = {key: name for name, keys in KEYS.items() for key in keys} | {"init": "checkpoint"}
# Who uses a reasoner has no key for a field's name.
_NAME, _RENAME = "name the one that holds it with config.data.fields.", "rename the one that holds it to "
_RENAMED = {_NAME + field: _RENAME + field for field in ("question", "answer")}

FLAGS = _RENAMED | {f"config.{key}": f"--{name}" for key, name in _ARGUMENTS.items()}
"""Of the commands that use a reasoner."""
ARGUMENTS = _RENAMED | {f"config.{key}": name for key, name in _ARGUMENTS.items()}
ARGUMENTS |= {f"--{name}": name for name in ("checkpoint", *KEYS)}
"""Of `slpo_jax.load` and what it returns."""
READ = {"config.prompt.answers": "answers"}
READ |= {f"config.data.fields.{field}": f"fields['{field}']" for field in ("question", "answer", "steps")}
"""Of `slpo_jax.read`."""
_OF_TRAIN = ("--config.evaluate.thresholds", "--workdir", "--train", "--valid", "--base")
TRAIN = {name: name.removeprefix("--") for name in _OF_TRAIN} | {"--config": "start", "--test": "eval"}
"""Of `slpo_jax.train`, whose `config` takes keys as they are."""


@contextlib.contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Have a `UserError` name what the user has given; of calls inside each other the outermost says how.

    Args:
        names: by key of the config, "config.KEY", or flag, "--NAME".
    """
    if _inside.get():
        yield
        return
    token = _inside.set(True)
    try:
        yield
    except UserError as error:
        known = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        found = rf"(?<![\w./-])(?:--(?=config\.))?({known})(?![\w-]|\.\w)"
        error.args = (re.sub(found, lambda match: names[match[1]], str(error)),)
        raise
    finally:
        _inside.reset(token)
