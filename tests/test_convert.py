"""Hugging Face -> checkpoint -> Hugging Face, and runs that begin with given weights."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from models.qwen3 import Qwen3Config
from omnijax import convert, ginfile, hf, parameters
from omnijax.config import Train
from omnijax.errors import UserError
from omnijax.train import train
from sharding_rules import qwen3 as rules
from tests import laws
from tests.meshes import on
from tests.runs import write_config

pytestmark = pytest.mark.newest

CASES = [laws.GOLDEN / "qwen3" / "tied", laws.GOLDEN / "llama" / "untied_llama3rope_bias"]


def run_convert(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["convert", *map(str, arguments)])
    convert.main()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.parent.name)
def test_weights_come_back_to_the_byte(case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_convert(monkeypatch, "import", case, tmp_path / "imported")
    run_convert(monkeypatch, "export", tmp_path / "imported", tmp_path / "out", "--like", case)
    original, written = load_file(case / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert {name: x.tobytes() for name, x in written.items()} == {name: x.tobytes() for name, x in original.items()}
    with pytest.raises(UserError, match="already holds checkpoints"):
        run_convert(monkeypatch, "import", case, tmp_path / "imported")


def test_folders_without_checkpoints_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no checkpoints here"):
        run_convert(monkeypatch, "export", tmp_path, tmp_path / "out")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with the sizes of the tiny config, of fresh but other weights."""
    path = tmp_path_factory.mktemp("weights") / "hf"
    config = Qwen3Config(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=4,
        initializer_range=0.5,
    )
    with on(None, rules.table()) as mesh:
        hf.save(parameters.build_model(config, mesh, rules.table(), seed=11), path)
    return path


def begin(folder: Path, *overrides: str) -> tuple[dict[str, float], Path]:
    """Run the tiny config with a learning rate of almost 0; returns the last metrics and the run folder."""
    folder.mkdir()
    text = write_config(folder).read_text().replace('"texts.jsonl"', repr(str(folder / "texts.jsonl")))
    (folder / "tiny.gin").write_text(text)
    fixed = ["Run.steps=1", f"Run.dir={folder / 'run'}", "Mesh.data=8", "Optimizer.learning_rate=1e-30"]
    loaded = ginfile.load(folder / "tiny.gin", [*fixed, "Optimizer.weight_decay=0.0", *overrides], root=Train)
    return train(loaded.value, loaded.text), folder / "run"


def test_a_run_begins_with_the_weights_it_is_given(weights: Path, tmp_path: Path, monkeypatch) -> None:
    fresh, _ = begin(tmp_path / "fresh")
    given, run = begin(tmp_path / "given", f"Run.start={weights}")
    assert given["loss"] > fresh["loss"] + 0.5  # of large random weights
    run_convert(monkeypatch, "import", weights, tmp_path / "imported")
    imported, _ = begin(tmp_path / "from_import", f"Run.start={tmp_path / 'imported'}")
    from_run, _ = begin(tmp_path / "from_run", f"Run.start={run}")
    assert imported["loss"] == given["loss"] == from_run["loss"]
    run_convert(monkeypatch, "export", run, tmp_path / "out")
    for name, x in load_file(weights / "model.safetensors").items():
        np.testing.assert_array_equal(load_file(tmp_path / "out" / "model.safetensors")[name], x)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rms_norm_eps": 1e-3}, r"holds another model: rms_norm_eps = 0.001 there and 1e-06 in this config"),
        ({"num_hidden_layers": 3}, "num_hidden_layers = 3 there and 2 in this config"),
        ({"model_type": "llama"}, "model_type 'llama' is not this family's, 'qwen3'"),
    ],
)
def test_weights_of_another_model_are_refused(weights: Path, changed: dict, message: str, tmp_path: Path) -> None:
    shutil.copytree(weights, tmp_path / "other")
    config = json.loads((weights / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(UserError, match=message):
        begin(tmp_path / "run", f"Run.start={tmp_path / 'other'}")


def test_a_start_that_is_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a Hugging Face folder"):
        begin(tmp_path / "run", f"Run.start={tmp_path}")


def test_a_config_takes_its_model_from_a_folder(weights: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path)
    lines = [line for line in path.read_text().splitlines() if not line.startswith("qwen3.Qwen3Config")]
    text = "\n".join(lines).replace("from models import qwen3", "from models import families")
    text = text.replace("@qwen3.Qwen3Config()", "@families.hugging_face()")
    path.write_text(f"{text}\nfamilies.hugging_face.path = {str(weights)!r}\n")
    assert ginfile.load(path, root=Train).value.model.num_attention_heads == 8


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("Qwen3Config.intermediate_size=64", "intermediate_size = 32 there and 64 in this config"),
        ("Qwen3Config.rope_theta=3.0", "rope_theta = 10000.0 there and 3.0 in this config"),
        ("Compute.vocab_multiple=64", "embed_tokens.embedding"),
    ],
)
def test_a_run_of_another_model_is_no_start(override: str, message: str, weights: Path, tmp_path: Path) -> None:
    _, run = begin(tmp_path / "first", f"Run.start={weights}")
    with pytest.raises(UserError, match=message):
        begin(tmp_path / "second", f"Run.start={run}", override)
