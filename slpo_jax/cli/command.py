"""What the project's commands share: flags, and one line with status 2 for what the user can mend."""

import errno
import logging as python_logging
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from absl import app, flags, logging

from slpo_jax.config.registry import read_registrations
from slpo_jax.errors import SaveError, UserError, silent_when_unread
from slpo_jax.io import interrupts
from slpo_jax.io.lines import Lines

flags.DEFINE_bool("debug", False, "Show tracebacks.")
flags.DEFINE_multi_string("register", [], "Python file that registers methods of its own (slpo_jax.register_..).")


@silent_when_unread()
def run_command(
    main: Callable[[list[str]], None], parse: Callable[[list[str]], list[str]] | None = None, goes_on: bool = True
) -> None:
    """Parse the flags and run `main`; what the user can mend is printed as one line, and ends with status 2.

    That is a `UserError` of either, and what the operating system or a device refuses: a full disk, a place that can't
    be written to, more memory than there is. Ctrl-C is a line too, with status 130.

    Args:
        main: what to do, from the program's name and the arguments that are no flags.
        parse: the command line -> those arguments; None is `parse_flags`.
        goes_on: whether the same command goes on from what an interrupted one has finished.
    """
    own = flags.FLAGS.get_key_flags_for_module(main.__module__)
    for flag in (flags.FLAGS["debug"], flags.FLAGS["register"], *own):  # --help shows the main module's
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)

    def quiet(arguments: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)  # Orbax tells of every file
        # What is wrong with a file, our one line says; the variable is for a transformers that is yet to be imported.
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        python_logging.getLogger("transformers").setLevel(python_logging.ERROR)
        logging.get_absl_handler().setFormatter(Lines())
        if not flags.FLAGS.debug:
            _say_once()
        main(arguments)

    def parsed(arguments: list[str]) -> list[str]:
        try:
            return (parse or parse_flags)(["--help" if each == "-h" else each for each in arguments])
        except SystemExit:  # of --help, which absl ends with status 1
            sys.exit(0)

    interrupted = interrupts.LINE if goes_on else "interrupted"
    interrupts.watch(interrupted)
    try:
        with interrupts.plain():
            app.run(quiet, flags_parser=parsed)
    except BrokenPipeError:
        raise  # of what is printed, as a rule
    except (UserError, OSError) as error:
        if "--debug" in sys.argv:
            raise
        print(f"error: {error if isinstance(error, UserError) else _refused(error)}", file=sys.stderr)
        if isinstance(error, SaveError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(2)  # a plain exit waits for all threads
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        if "--debug" in sys.argv or not (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)):
            raise
        print(f"error: {_out_of_memory(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        if "--debug" in sys.argv:
            raise
        print(f"\n{interrupted}", file=sys.stderr)
        sys.exit(interrupts.STATUS)


def _say_once() -> None:
    """Have nobody print what a failing save raises as well: Orbax's threads, asyncio, tensorstore's callbacks."""
    python_logging.getLogger("asyncio").setLevel(python_logging.CRITICAL)
    logging.get_absl_logger().addFilter(lambda record: not (record.exc_info and "orbax" in record.pathname))
    print_it = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":  # the loop of another part of the save, which failed
            print_it(unraisable)

    sys.unraisablehook = hook


def _refused(error: OSError) -> str:
    """What the operating system said, and what there is to do about it."""
    path = error.filename2 or error.filename
    where = f"{path}: " if path else ""
    remedy = {
        errno.ENOSPC: "make room; what was finished is kept, and the same command goes on",
        errno.EDQUOT: "make room; what was finished is kept, and the same command goes on",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
    }.get(error.errno or 0, "check the path and its permissions")
    return f"{where}{error.strerror or ' '.join(str(error).split())}; {remedy}"


def _out_of_memory(error: RuntimeError | MemoryError) -> str:
    """What could not be had, and the settings that change how much is asked for."""
    reason = " ".join(str(error).split()).removeprefix("RESOURCE_EXHAUSTED: ")[:160]
    return (
        f"out of memory ({reason or 'of this machine'}); a step: raise config.STAGE.micro_batches, set "
        "config.model.remat and config.model.scan_layers, or config.sharding.fsdp; evaluation: lower "
        "config.evaluate.batch_size; what was finished is kept, and the same command goes on"
    )


def with_first(flag: str, argv: list[str]) -> list[str]:
    """The arguments that are no flags, without the first where that stands for a flag which isn't given."""
    if argv[1:] and not flags.FLAGS[flag].value:
        flags.FLAGS[flag].value = argv[1]
        return [argv[0], *argv[2:]]
    return argv


def take_keys(argv: list[str], section: str = "config") -> tuple[list[str], dict[str, str]]:
    """The arguments without keys of a config's section, and those as they are written, the last of each.

    A value may be the next argument.
    """
    rest, found, left = list[str](), dict[str, str](), list(argv)
    while left:
        arg = left.pop(0)
        if match := re.fullmatch(rf"--?{re.escape(section)}\.([^=]+)(?:=(.*))?", arg, re.DOTALL):
            follows = match[2] is None and left and not left[0].startswith("--")
            found[match[1]] = left.pop(0) if follows else match[2] or ""
        else:
            rest.append(arg)
    return rest, found


def parse_flags(argv: list[str]) -> list[str]:
    """absl's flags, before, between or after the other arguments, which are returned.

    Raises:
        UserError: an unknown flag or a value of another type.
    """
    flags.FLAGS.set_gnu_getopt(True)
    register(argv)
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        reason = " ".join(str(error).split()).rstrip(".")
        reason = refused_value(reason) or reason
        key = getattr(error, "flagname", "")
        if key.startswith("config.") and (name := key.rpartition(".")[2]) in flags.FLAGS:
            takes = flags.FLAGS[name].parser.syntactic_help or "a text"
            reason = f"--{key}: is a config's key; here give --{name}, {takes}"
        raise UserError(f"{reason}; see --help") from error


def refused_value(reason: str) -> str:
    """What is wrong with a flag's value, from what absl says of it; "" where it says something else."""
    found = re.match(r"flag --(\w+)=(.*?): ", reason)
    if not found:
        return ""
    if flags.FLAGS[found[1]].boolean:
        return f"--{found[1]}={found[2]}: takes no value; give --{found[1]}, or leave it out"
    takes = flags.FLAGS[found[1]].parser.syntactic_help
    return f"--{found[1]}={found[2]}: is not valid; give {takes}" if takes else ""


def register(argv: list[str]) -> None:
    """Run the files of --register, before flags are read whose values they may be.

    Raises:
        UserError: one can't be used.
    """
    for place, argument in enumerate(argv):
        flag, given, path = argument.partition("=")
        if flag in ("--register", "-register"):
            read_registrations(path if given else "".join(argv[place + 1 : place + 2]))
