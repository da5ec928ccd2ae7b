"""Methods from a user's own file: registered under a name, they work as ours do, wherever a config names them.

A file that registers is a config file, or imported by one, or is named with --register where there is none. Config
files are found by name: those of `configs/`, which the package brings along, and the user's own.
"""

import ast
import dataclasses
import functools
import re
import sys
import tempfile
import types
from collections.abc import Callable, MutableMapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from slpo_jax.data.record_readers import reader_of
from slpo_jax.errors import UserError, in_a_line

if TYPE_CHECKING:
    from slpo_jax.rewards.reward import DeviceReward


_held: list[Any] = []  # what is removed when this process ends
_OURS: dict[
    int, frozenset[str]
] = {}  # by a registry's identity, the names that it came with


def register_objective(name: str, objective: type) -> None:
    """Have `config.rl.objectives` take an objective under this name, with its section `config.objective.NAME`.

    Args:
        objective: a frozen dataclass that extends `slpo_jax.training.objectives.Objective`.
    Raises:
        UserError: the name can't be used, or it is none.
    """
    from slpo_jax.training.objectives import OBJECTIVES, Objective

    _register(OBJECTIVES, "objective", name, objective, Objective)


def register_latent_policy(name: str, settings: type) -> None:
    """Have `config.latent_policy.name` take a latent policy under this name, with its section
    `config.latent_policy.NAME`.

    Args:
        settings: a frozen dataclass that extends `slpo_jax.policy.latent_policies.LatentPolicySettings`.
    Raises:
        UserError: the name can't be used, or it is none.
    """
    from slpo_jax.policy.latent_policies import LATENT_POLICIES, LatentPolicySettings

    _register(LATENT_POLICIES, "latent_policy", name, settings, LatentPolicySettings)


def register_reward(
    name: str, function: Callable[..., Any], on_device: "DeviceReward | None" = None
) -> None:
    """Have `config.reward` and `config.rewards` take a function under this name.

    Args:
        function: of what it names among question, answer, steps, completion and the record's other columns, by name,
            -> a finite number; or, as TRL's, of `completions` (and `prompts`) with lists of all else -> a list of them.
            It is asked on the host, and may name `latents`, `truncated` and `is_right` (docs/rewards.md). In evaluation
            those that earn 1 or more are right.
        on_device: the same inside jit, where it says 0 or 1 alone.
    Raises:
        UserError: the name or the function can't be used.
    """
    from slpo_jax.rewards.functions import names_of
    from slpo_jax.rewards.reward import REWARDS, RewardEntry

    if not callable(function):
        raise UserError(
            f"register_reward: {name}: {function!r} is no function; give one"
        )
    names_of(function)
    _put(REWARDS, "reward", name, RewardEntry(function, on_device))


def register_recipe(name: str, settings: type) -> None:
    """Have `config.imitate.recipe` take a recipe under this name, with its section `config.imitate.NAME`.

    Args:
        settings: a `slpo_jax.training.recipes.RecipeSettings`.
    Raises:
        UserError: the name can't be used, or it is none.
    """
    from slpo_jax.training.recipes import RECIPES, ImitateSettings, RecipeSettings

    keys = sorted(field.name for field in dataclasses.fields(ImitateSettings))
    if name in keys:
        raise UserError(
            f"register_recipe: {name!r} is a key of config.imitate; use another name than {keys}"
        )
    _register(RECIPES, "recipe", name, settings, RecipeSettings)


def register_scorer(name: str, scorer: Any) -> None:
    """Have `config.evaluate.scorers` take a scorer under this name.

    Args:
        scorer: a `slpo_jax.policy.scorers.ScoreFn` that gives 0 or more, or a `Scorer`.
    Raises:
        UserError: the name can't be used.
    """
    from slpo_jax.policy.scorers import SCORERS, Scorer

    _put(
        SCORERS,
        "scorer",
        name,
        scorer if isinstance(scorer, Scorer) else Scorer(scorer),
    )


def register_tracker(name: str, start: Callable[[Path, dict[str, Any]], Any]) -> None:
    """Have `config.trackers` take a tracker under this name.

    Args:
        start: (workdir, config as nested dicts) -> a `slpo_jax.training.metrics.Tracker`.
    Raises:
        UserError: the name can't be used.
    """
    from slpo_jax.training.metrics import TRACKERS

    _put(TRACKERS, "tracker", name, start)


def _register(
    registry: MutableMapping[str, Any], what: str, name: str, cls: type, base: type
) -> None:
    extends = isinstance(cls, type) and issubclass(cls, base)
    if not (extends and dataclasses.is_dataclass(cls)):
        raise UserError(
            f"register_{what}: {name}: {cls!r} is no dataclass that extends {base.__name__}; give one"
        )
    _put(registry, what, name, cls)


def _put(registry: MutableMapping[str, Any], what: str, name: str, value: Any) -> None:
    """Register a value; a file may be read twice, and put what it registers in its own place."""
    builtin = _OURS.setdefault(id(registry), frozenset(registry))
    if name in builtin:
        raise UserError(f"register_{what}: {name!r} is one of ours; use another name")
    if not re.fullmatch(r"[^\W\d]\w*", name) or name in ("name", "kind"):
        remedy = "use letters, digits and _, but not name or kind"
        raise UserError(f"register_{what}: {name!r} is to be a config's key; {remedy}")
    registry[name] = value


def read_registrations(path: str) -> None:
    """Run a Python file that registers methods.

    Raises:
        UserError: there is no such file, or it fails.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(
            f"--register={path}: no such file; give a Python file that calls slpo_jax.register_.."
        )
    run_file(file, f"--register={path}")


def run_file(
    file: Path,
    flag: str,
    beside: Sequence[Path] = (),
    function: str = "",
    *arguments: str,
) -> Any:
    """Run a user's Python file, and return the result of one of its functions.

    Args:
        flag: that names it, for messages.
        beside: folders that it may import from, beside its own.
    Raises:
        UserError: it fails.
    """
    loader = SourceFileLoader(f"slpo_jax_{file.stem}", str(file))
    module = sys.modules[loader.name] = types.ModuleType(loader.name)
    module.__file__ = str(file)
    _make_importable(loader.name, file.resolve())
    # It may import what lies beside it.
    folders = [str(folder) for folder in (file.parent.resolve(), *beside)]
    sys.path[:0] = folders
    try:
        loader.exec_module(module)
        return getattr(module, function)(*arguments) if function else None
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        # The user's code can raise anything. A locked config would list all that it holds.
        line, _, _ = in_a_line(error).partition(" since the config is locked")
        raise UserError(f"{flag}: {line}; mend the file") from error
    finally:
        # The file may have put folders of its own anywhere: take out these very texts alone.
        added = {id(folder) for folder in folders}
        sys.path[:] = [entry for entry in sys.path if id(entry) not in added]


@functools.cache
def _make_import_folder() -> Path:
    """Make the folder from which another process imports a user's files by the names that they have here.

    It goes with this process. A pool whose processes are spawned finds it by this process's path.
    """
    folder = tempfile.TemporaryDirectory(prefix="slpo_jax_")
    _held.append(folder)
    sys.path.append(folder.name)
    return Path(folder.name)


def _make_importable(name: str, file: Path) -> None:
    """Have a process that this one starts import a user's file as it is run here, with its folder to import from."""
    lines = [
        "import sys",
        f"__file__ = {str(file)!r}",
        f"sys.path.insert(0, {str(file.parent)!r})",
        "exec(compile(open(__file__, 'rb').read(), __file__, 'exec'))",
        "",
    ]
    module = _make_import_folder() / f"{name}.py"
    module.write_text("\n".join(lines), encoding="utf-8")


_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_folder() -> Path:
    """Return where the shipped configs are: in the installed package, or beside it in a checkout."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def list_shipped() -> dict[str, str]:
    """Return the names of the shipped configs, each with the first line of its docstring."""
    lines = dict[str, str]()
    for file in sorted(shipped_folder().glob("[!_]*.py")):
        # A config is read, not run: running it imports jax.
        tree = ast.parse(file.read_text(encoding="utf-8"))
        docstring = ast.get_docstring(tree) or ""
        lines[file.stem] = docstring.partition("\n")[0]
    return lines


def find_config(source: str) -> str:
    """Return the path of a config given as a path, a name, or what a checkout calls it, `configs/NAME.py`.

    Args:
        source: with or without ":ARGUMENT" of its `get_config` at its end, which stays.
    Raises:
        UserError: there is neither such a file nor such a name.
    """
    path, colon, argument = source.partition(":")
    file = Path(path).expanduser()
    # A file of this path comes before a shipped config of this name.
    name = re.fullmatch(r"(?:configs/)?([\w-]+)(?:\.py)?", path)
    if not file.is_file() and name:
        shipped_file = shipped_folder() / f"{name[1]}.py"
        if shipped_file.is_file():
            file = shipped_file
    if not file.is_file():
        problem = "no such file"
        if not path:
            problem = "is empty"
        elif file.is_dir():
            problem = "a directory"
        names = ", ".join(list_shipped())
        raise UserError(f"--config={path}: {problem}; give a file, or one of {names}")
    if reader_of(file):
        raise UserError(f"--config={path}: is data, not a config; give it as --train")
    return f"{file}{colon}{argument}"


def read_config_file(source: str) -> ConfigDict:
    """Call `get_config` of a config file, and return its result.

    Args:
        source: as `find_config` takes it.
    Raises:
        UserError: there is no such file, or it fails.
    """
    path, _, argument = find_config(source).partition(":")
    arguments = [argument] if argument else []
    config = run_file(
        Path(path),
        f"--config={source}",
        [shipped_folder()],
        "get_config",
        *arguments,
    )
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"--config={source}: get_config returns no ConfigDict; begin with slpo_jax.config"
        )
    return config
