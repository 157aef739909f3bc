"""The benchmarks' own code, at sizes that say nothing of speed."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SIZES = {
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rope_theta": 1e4,
    "hidden_size": 64,
    "num_attention_heads": 4,
}
DENSE = SIZES | {"intermediate_size": 80}
MOE = SIZES | {
    "head_dim": 24,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU here")
def test_without_a_gpu_the_benchmark_says_so_and_measures_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "gpu.py"), str(tmp_path / "results.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "there is no GPU here (jax runs on: cpu); nothing was measured\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("family", "sizes", "experts"), [("qwen2", DENSE, "auto"), ("qwen3_moe", MOE, "ragged")])
def test_a_case_is_measured_and_becomes_a_line_of_the_table(
    family: str, sizes: dict, experts: str, monkeypatch
) -> None:
    gpu = load("gpu")
    found = gpu.measure(family, sizes, rows=1, length=64, documents=3, attention="blockwise", experts=experts, steps=1)
    assert found["seconds"] > 0
    assert found["bytes"] > 4 * 3 * 2 * 64 * 80  # at least parameters and moments
    monkeypatch.setitem(gpu.MODELS, family, sizes)
    case = {"group": family, "length": 64, "documents": 3} | found | {"device": "NVIDIA H200"}
    case |= gpu.rates(family, case, rows=1)
    assert case["tokens_per_second"] == 64 / case["seconds"]
    line = gpu.table([case, {"group": "other", "length": 8, "documents": 1, "error": "no time left"}]).splitlines()
    assert f"{case['mfu']:.1%}" in line[1]
    assert line[2].endswith("no time left")


def test_the_growth_of_a_step_is_measured_and_fitted() -> None:
    context = load("context")
    assert context.exponent([(2, 3.0), (4, 12.0), (8, 48.0)]) == pytest.approx(2)
    sizes = {name: value for name, value in DENSE.items() if name != "rope_theta"} | {"head_dim": 16}
    short, long = context.measure(sizes, (64, 128), timed=64, steps=1)
    assert short["seconds"] > 0
    assert "seconds" not in long
    assert short["bytes"] < long["bytes"]


def test_packed_rows_hold_so_many_documents_with_positions_that_restart() -> None:
    arrays = load("gpu").packed(3, 50, 4, 96)
    for segments, positions in zip(arrays["segment_ids"], arrays["positions"], strict=True):
        assert set(segments) == {1, 2, 3, 4}
        lengths = np.unique(segments, return_counts=True)[1]
        np.testing.assert_array_equal(positions, np.concatenate([np.arange(length) for length in lengths]))


@pytest.mark.peer
@pytest.mark.parametrize("sizes", [DENSE, MOE])
def test_the_layers_in_torch_learn(sizes: dict) -> None:
    measure = load("gpu_torch").measure
    first, last = (measure(sizes, rows=2, length=32, steps=steps, device="cpu")["loss"] for steps in (1, 60))
    assert last < first - 0.02
