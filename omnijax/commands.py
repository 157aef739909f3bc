"""What every command does around its work: user mistakes end in one line and exit code 2."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

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
