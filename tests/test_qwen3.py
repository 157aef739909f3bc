"""Qwen3: parity with transformers, and the laws on every mesh."""

import dataclasses

import pytest

from models.qwen3 import Qwen3Config
from omnijax.sharding import AttentionLayout
from sharding_rules import qwen3 as rules
from tests import laws
from tests.meshes import MESHES, packed_arrays

# Pairwise different sizes, which the meshes divide; 2 key/value heads are fewer than any mesh's parts.
TINY = Qwen3Config(
    vocab_size=208,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=20,
    initializer_range=0.05,
)
VARIANTS = {
    "untied": TINY,
    "tied": dataclasses.replace(TINY, tie_word_embeddings=True),
    "window": dataclasses.replace(TINY, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "bias": dataclasses.replace(TINY, attention_bias=True),
}


@pytest.fixture(scope="module")
def one_device() -> dict:
    return laws.run(TINY, rules.table(), None)


@pytest.mark.newest
@pytest.mark.parametrize("batch", ["padded", "packed"])
@pytest.mark.parametrize("variant", ["tied", "untied"])
def test_parity(variant: str, batch: str) -> None:
    laws.parity(laws.GOLDEN / "qwen3" / variant, batch)


@pytest.mark.parametrize("mesh", MESHES)
def test_equivalence(mesh: str, one_device: dict) -> None:
    laws.equivalence(TINY, rules.table(), mesh, one_device)


@pytest.mark.newest
@pytest.mark.parametrize("mesh", ["sequence 8", "sequence 4 x data 2"])
def test_equivalence_of_the_ring(mesh: str, one_device: dict) -> None:
    laws.equivalence(TINY, rules.table("ring"), mesh, one_device)


@pytest.mark.parametrize(
    "mesh", ["sequence 4 x data 2", pytest.param("data 2 x sequence 2 x tensor 2", marks=pytest.mark.full)]
)
def test_equivalence_in_chunks_of_heads(mesh: str, one_device: dict) -> None:
    laws.equivalence(TINY, rules.table(chunks=2), mesh, one_device)


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", ["ulysses", "ring"])
@pytest.mark.parametrize("mesh", MESHES)
def test_equivalence_of_every_variant(mesh: str, layout: AttentionLayout, variant: str) -> None:
    expected = laws.run(VARIANTS[variant], rules.table(), None)
    laws.equivalence(VARIANTS[variant], rules.table(layout), mesh, expected)


@pytest.mark.newest
@pytest.mark.parametrize("variant", ["untied", "window"])
def test_isolation(variant: str) -> None:
    laws.isolation(VARIANTS[variant])


@pytest.mark.parametrize("remat", ["full", "dots", "offload"])
def test_remat_changes_nothing(remat: str, one_device: dict) -> None:
    laws.assert_same_run(laws.run(TINY, rules.table(), None, remat=remat), one_device)


def test_the_window_reaches_exactly_that_far() -> None:
    narrow = laws.run(VARIANTS["window"], rules.table(), None, steps=1)
    wide = dataclasses.replace(VARIANTS["window"], sliding_window=48)
    full = laws.run(TINY, rules.table(), None, steps=1)
    assert laws.run(wide, rules.table(), None, steps=1)["losses"] == pytest.approx(full["losses"], rel=1e-6)
    assert narrow["losses"] != pytest.approx(full["losses"], rel=1e-6)


@pytest.mark.parametrize("accumulation", [2, 4])
@pytest.mark.parametrize("mesh", [None, "replica 2 x data 4"])
def test_accumulation_changes_nothing(accumulation: int, mesh: str | None) -> None:
    arrays = packed_arrays(rows=32, vocab=TINY.vocab_size)
    expected = laws.run(TINY, rules.table(), None, arrays=arrays)
    found = laws.run(TINY, rules.table(), mesh, arrays=arrays, accumulation=accumulation)
    laws.assert_same_run(found, expected)
