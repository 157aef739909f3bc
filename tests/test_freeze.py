"""What is trained and what is not: stacks cut at layers, frozen parameters, learning rates by path."""

from pathlib import Path

import pytest

from omnijax import restack
from tests import runs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_config(tmp_path_factory.mktemp("freeze"))


@pytest.mark.parametrize(("first", "then"), [((), (1,)), ((1, 2), (2,))])
def test_a_run_goes_on_with_stacks_cut_elsewhere(first: tuple, then: tuple, tiny: Path) -> None:
    folder = f"cut_{len(first)}"
    options = ("Qwen3Config.num_hidden_layers=3", "Checkpoint.every=2", "Checkpoint.keep=9", "Run.steps=4")
    straight = runs.run(tiny, *options, f"Compute.splits={first}", folder=folder)
    (tiny.parent / folder / "checkpoints" / "step_4").rename(tiny.parent / f"{folder}_end")
    seen = runs.run(tiny, *options, f"Compute.splits={then}", folder=folder)
    assert seen.losses == pytest.approx(straight.losses, rel=1e-6)
    assert not seen.misplaced
    shapes = {path: x.shape for path, x in straight.after.params.items()}
    assert restack.layers(shapes) == restack.layers({path: x.shape for path, x in seen.after.params.items()})
