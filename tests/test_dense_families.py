"""Llama and Qwen2: parity with transformers, the laws, and checkpoints that come out as they went in."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import models
from models.llama import Llama, LlamaConfig
from models.qwen2 import Qwen2Config
from omnijax import hf, parameters
from omnijax.errors import UserError
from omnijax.nn.rope import Llama3Scaling, inverse_frequencies
from sharding_rules import llama as llama_rules
from sharding_rules import qwen2 as qwen2_rules
from tests import laws
from tests.meshes import MESHES

SIZES = {
    "vocab_size": 208,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "initializer_range": 0.05,
}
SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
FAMILIES = {
    "llama": (LlamaConfig(**SIZES, rope_scaling=SCALING), llama_rules.table()),
    "llama tied, biased": (
        LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        llama_rules.table(),
    ),
    "qwen2": (Qwen2Config(**SIZES), qwen2_rules.table()),
    "qwen2 windows": (
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1),
        qwen2_rules.table(),
    ),
}
CASES = sorted(path.parent for path in laws.GOLDEN.glob("*/*/case.json"))


@pytest.mark.parametrize("batch", ["padded", "packed"])
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.parent.name in ("llama", "qwen2")], ids=lambda case: case.name
)
def test_parity(case: Path, batch: str) -> None:
    laws.parity(case, batch)


@pytest.mark.parametrize("name", ["llama", "qwen2 windows"])
def test_equivalence(name: str) -> None:
    laws.equivalence(*FAMILIES[name], "data 2 x sequence 2 x tensor 2", laws.run(*FAMILIES[name], None))


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_equivalence_of_every_variant(mesh: str, name: str) -> None:
    laws.equivalence(*FAMILIES[name], mesh, laws.run(*FAMILIES[name], None))


@pytest.mark.parametrize("name", ["llama", "qwen2 windows"])
def test_isolation(name: str) -> None:
    laws.isolation(FAMILIES[name][0])


def test_llama3_scaling_by_hand() -> None:
    """At theta 10,000 and width 8 the pairs turn 5.09, 0.509, 0.0509, 0.00509 times in 32 positions."""
    plain = 10000.0 ** -np.array([0.0, 0.25, 0.5, 0.75])
    scaled = inverse_frequencies(8, 10000.0, SCALING)
    np.testing.assert_allclose(scaled, plain * [1, 1 / 8, 1 / 8, 1 / 8], rtol=1e-6)
    wider = dataclasses.replace(SCALING, original_max_position_embeddings=128)
    kept = (128 * 0.1 / (2 * np.pi) - 1) / 3  # the second pair turns 2.04 times: between 1 and 4
    expected = plain * [1, kept + (1 - kept) / 8, 1 / 8, 1 / 8]
    np.testing.assert_allclose(inverse_frequencies(8, 10000.0, wider), expected, rtol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}-{case.name}")
def test_export_is_bit_exact(case: Path, tmp_path: Path) -> None:
    """Import and export give the names, shapes, dtypes and bytes of the original, and a config of equal meaning."""
    family = models.family_of(case)
    model = hf.load(family, case)
    hf.save(model, tmp_path / "out", like=case)
    original, written = load_file(case / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(original) == set(written)
    for name, x in original.items():
        assert (x.dtype, x.shape, x.tobytes()) == (written[name].dtype, written[name].shape, written[name].tobytes())
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (case, tmp_path / "out"))
    assert after.pop("torch_dtype") == before.pop("dtype")
    assert before == after
    hf.save(model, tmp_path / "alone")
    written_config = json.loads((tmp_path / "alone" / "config.json").read_text())
    assert family.Config.from_hf(written_config) == model.config
    assert models.family_of(tmp_path / "alone") is family


def test_large_models_are_written_in_files_with_an_index(tmp_path: Path) -> None:
    case = laws.GOLDEN / "qwen3" / "untied"
    model = hf.load(models.family_of(case), case)
    hf.save(model, tmp_path / "out", shard_bytes=50_000)
    files = sorted(tmp_path.glob("out/*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert len(files) > 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for file in files for x in load_file(file).values())
    again = parameters.split(hf.load(models.family_of(case), tmp_path / "out"))[1]
    for path, x in parameters.split(model)[1].items():
        np.testing.assert_array_equal(x, again[path])
    assert sorted(path.name for path in (tmp_path / "out").iterdir())[:2] == ["config.json", files[0].name]


def test_a_model_is_never_written_over(tmp_path: Path) -> None:
    model = hf.load(Llama, laws.GOLDEN / "llama" / "tied_llama3rope")
    hf.save(model, tmp_path / "out", dtype=np.dtype("bfloat16"))
    assert {x.dtype.name for x in load_file(tmp_path / "out" / "model.safetensors").values()} == {"bfloat16"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with pytest.raises(UserError, match="already holds a model; choose another folder"):
        hf.save(model, tmp_path / "out")
    with pytest.raises(UserError, match="describes another model than the one to save"):
        hf.save(model, tmp_path / "other", like=laws.GOLDEN / "llama" / "untied_llama3rope_bias")
