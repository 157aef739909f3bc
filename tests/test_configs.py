"""Every example config trains, and so does one that binds nothing but what must be bound."""

import math
from pathlib import Path

import pytest

from omnijax import config, ginfile, train
from tests import runs

# Those for a cluster are compiled for it, in test_long_context.py.
CONFIGS = sorted(path for path in (runs.HOME / "configs").glob("**/*.gin") if not path.stem.startswith("qwen3_30b"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_an_example_trains(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps, its evaluation at the end, and four tokens of its sample, on eight devices."""
    monkeypatch.chdir(runs.HOME)
    overrides = ["Run.steps=2", f"Run.dir='{tmp_path}'", "Sample.tokens=4"]
    loaded = ginfile.load(path, overrides, root=config.Train)
    last = train.train(loaded.value, loaded.text)
    # An untrained model knows nothing: its loss is about that of a guess.
    assert last["loss"] == pytest.approx(math.log(loaded.value.model.vocab_size), rel=0.1)


def test_the_defaults_train(tmp_path: Path) -> None:
    """The config of `tests.runs` without what it binds beyond the model's size and the required fields."""
    path = runs.write_config(tmp_path)
    optional = ("Data.holdout", "Optimizer.schedule", "Compute.dtype")
    lines = [
        line for line in path.read_text().splitlines() if not line.startswith(tuple(f"config.{o}" for o in optional))
    ]
    path.write_text("\n".join(lines))
    seen = runs.run(path, "Run.steps=2")
    assert [line["step"] for line in seen.metrics] == [1, 2]
    assert seen.losses == pytest.approx([math.log(257)] * 2, rel=0.1)
