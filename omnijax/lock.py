"""One run a folder: a lock that its process holds, and that the system takes back however the process ends."""

import contextlib
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from omnijax.errors import UserError


@contextlib.contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Inside this context no other process runs in `folder`; a `UserError` names the one that does.

    Where the file system cannot lock, which is said, nothing is kept out.
    """
    # A record lock is the process's own: a forked child does not hold it on. It ends when any file object of it closes.
    with open(folder / "lock", "a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            raise UserError(
                f"{folder}: {file.read() or 'another process'} is running here; wait for it, or choose another Run.dir"
            ) from None
        except OSError as error:
            print(f"warning: {folder} cannot be locked ({error.strerror}): start no second run in it", file=sys.stderr)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
