"""What every command does around its work: user mistakes end in one line and exit code 2."""

import importlib
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from omnijax import ginfile
from omnijax.errors import UserError


def run(main: Callable[[], None]) -> None:
    """Run a command's `main`. A `UserError` is printed alone; every other error is ours and keeps its traceback."""
    # Into a file, lines are written as they come, and what its encoding lacks is escaped.
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    try:
        find_our_packages()
        main()
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def settings_from_command_line(command: str) -> ginfile.Loaded:
    """The config that `python -m omnijax.<command> CONFIG.gin [Name.field=value ...]` names; `--help` ends here."""
    from omnijax import config  # not above: it imports jax, which a mistake on the command line need not wait for

    usage, arguments = f"python -m omnijax.{command} CONFIG.gin [Name.field=value ...]", sys.argv[1:]
    if not arguments:
        raise UserError(f"no config file is given; write {usage}")
    if arguments[0] in ("-h", "--help"):
        print(f"usage: {usage}\nevery field and its meaning: {config.__file__}")
        raise SystemExit(0)
    return ginfile.load(arguments[0], arguments[1:], root=config.Train)


def python() -> str:
    """This interpreter as a shell here would call it."""
    path = Path(sys.executable)
    inside = path.is_relative_to(Path.cwd())
    return shlex.quote(str(path.relative_to(Path.cwd()) if inside else path))


def find_our_packages() -> None:
    """Let a `models` or `sharding_rules` folder of the user's stand beside ours, and say so.

    `python -m` looks into the working directory first, so a folder of that name there hides ours; ours is appended
    to its search path, and a submodule of the user's goes first.
    """
    home = Path(__file__).resolve().parent.parent
    for name in ("models", "sharding_rules"):
        package = importlib.import_module(name)
        ours = str(home / name)
        if not hasattr(package, "__path__"):
            raise UserError(f"{package.__file__} hides the package '{name}' of OmniJAX; rename it, or run elsewhere")
        theirs = str(Path(name).resolve())
        for path in (theirs, ours):  # a folder of theirs without an __init__.py is found second
            if os.path.isdir(path) and not any(os.path.samefile(path, other) for other in package.__path__):
                package.__path__.append(path)
                print(f"package {name} is looked up in {', then '.join(package.__path__)}", file=sys.stderr)
