"""The linter, the formatter and the type checker find nothing; the README's commands are the ones that are tested."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("command", ["ruff check", "ruff format --check", "mypy"])
def test_tools_find_nothing(command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command.split()], cwd=HOME, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ci_runs_the_test_command_of_the_readme() -> None:
    commands = re.findall(r"^python3 -m venv .*$", (HOME / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 2
    assert "omnijax.train configs/quickstart.gin" in commands[0]
    assert commands[1] in (HOME / ".ci" / "run").read_text()
