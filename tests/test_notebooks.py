"""Every notebook runs from top to bottom, cell by cell, and trains what it says it trains."""

import json
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((HOME / "notebooks").glob("*.ipynb"))


def run(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Execute the code cells in one namespace, in the folder of the notebook, and return it."""
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)  # a backend without a window warns
    namespace: dict = {"__name__": "__main__"}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}:{cell['id']}", "exec"), namespace)
    return namespace


def test_first_light(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = run(HOME / "notebooks" / "first_light.ipynb", monkeypatch)
    assert len(namespace["losses"]) == 50
    assert namespace["losses"][-1] < namespace["losses"][0] - 2
    assert (namespace["folder"] / "model.safetensors").is_file()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_results(path: Path) -> None:
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
