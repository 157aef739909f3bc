"""`docs/new_modality.md`: its files train a model to read recordings, and nothing of the library knows of them."""

import importlib
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from omnijax.batch import Media
from omnijax.metrics import read_metrics
from tests import runs
from tests.test_chat_training import refusal

DOCUMENT = (runs.HOME / "docs" / "new_modality.md").read_text("utf-8")
FILES = dict(re.findall(r"^```\w+ (\S+)\n(.*?)^```$", DOCUMENT, re.M | re.S))
OWN = ("motion.py", "motion_rows.py", "motion.gin")
WORDS = ("up", "down", "walk", "tilt")
CHANCE = math.log(4) / np.mean([len(word) + 1 for word in WORDS])  # nats of each letter, and of the end


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The document's files, and the data that they make."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    made = runs.finish(runs.start(tmp_path, "make_data.py"))
    assert made.returncode == 0, made.stderr
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def motion(folder: Path) -> ModuleType:
    return importlib.import_module("motion")


def test_a_modality_is_so_many_lines() -> None:
    assert FILES.keys() == {*OWN, "make_data.py"}
    count = sum(bool(line.strip()) for name in OWN for line in FILES[name].splitlines())
    assert count < 120
    assert f"{count} lines" in DOCUMENT
    assert f"{CHANCE:.3f} for each" in DOCUMENT


def test_nothing_of_the_library_names_it() -> None:
    for place in ("omnijax", "models", "sharding_rules"):
        for path in (runs.HOME / place).rglob("*.py"):
            assert "motion" not in path.read_text("utf-8").lower(), path


FEW = ("Run.steps=2", "Evaluation.every=0")


def test_a_few_steps(folder: Path) -> None:
    seen = runs.run(folder / "motion.gin", *FEW, "Data.workers=1")
    assert seen.losses[1] < seen.losses[0]
    assert 0 < seen.metrics[0]["fill/motion"] <= 1
    assert seen.metrics[0]["imbalance/motion"] >= 1


@pytest.mark.full
def test_any_mesh_has_the_losses_of_another(folder: Path) -> None:
    plain = runs.run(folder / "motion.gin", *FEW, folder="plain")
    mesh = runs.run(folder / "motion.gin", *FEW, "Mesh.data=2", "Mesh.sequence=2", "Mesh.tensor=2", folder="mesh")
    np.testing.assert_allclose(mesh.losses, plain.losses, rtol=2e-5)
    assert mesh.row_ids == plain.row_ids


@pytest.mark.full
def test_it_learns_to_read_recordings(folder: Path) -> None:
    done = runs.finish(runs.start(folder, "-m", "omnijax.train", "motion.gin", XLA_FLAGS=None))
    assert done.returncode == 0, done.stderr
    [last] = [line for line in read_metrics(folder / "run") if line["step"] == 200]
    assert last["heldout/loss"] < CHANCE / 4


def test_recordings_of_a_row_never_mix(motion: ModuleType) -> None:
    encoder = nnx.jit(motion.MotionConfig().build(rngs=nnx.Rngs(0)))
    features = jax.random.normal(jax.random.key(0), (1, 8, 16, 3))

    def media(places: list[int], segments: list[int], features: jax.Array) -> Media:
        numbers = jnp.asarray([segments], jnp.int32)
        grid = jnp.ones((1, len(places), 3), jnp.int32)
        return Media(features, numbers, jnp.asarray([places], jnp.int32), grid, numbers)

    packed = encoder(media([0, 1, 2, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 2, 0, 0], features))
    for first, end in ((0, 3), (3, 5), (5, 6)):
        alone = encoder(media([*range(end - first)], [1] * (end - first), features[:, first:end]))
        np.testing.assert_allclose(packed[:, first:end], alone, rtol=1e-5, atol=1e-6)
    other = encoder(media([0, 1, 2, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 2, 0, 0], features.at[0, 3].add(1.0)))
    assert np.array_equal(other[0, :3], packed[0, :3])
    assert not np.allclose(other[0, 4], packed[0, 4])  # but within one they do


def test_a_recording_that_cannot_be_read_is_a_bad_row(folder: Path) -> None:
    (folder / "recordings" / "0.npy").write_bytes(b"no numbers")
    rows: Any = (folder / "chats.jsonl").read_text().splitlines(keepends=True)[:1]
    (folder / "chats.jsonl").write_text("".join(rows * 40))
    message = refusal(lambda: runs.run(folder / "motion.gin", "Evaluation.every=0"))
    assert re.search(r"chats.jsonl:\d+: motion '.*0.npy' cannot be decoded", message)
