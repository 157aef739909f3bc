"""Qwen3 with experts: parity with transformers, and the laws."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import models
from models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig
from models.stacks import plan_stacks
from omnijax import hf, parameters
from omnijax.errors import UserError
from omnijax.nn.router import RouterLoss
from sharding_rules import qwen3_moe as rules
from tests import laws
from tests.meshes import MESHES, on, packed_arrays

CONFIGS = {
    "all layers": {"num_hidden_layers": 2},
    "every other layer": {"decoder_sparse_step": 2, "norm_topk_prob": True},
    "all but one": {"mlp_only_layers": (1,), "norm_topk_prob": True},
}
CASES = sorted((laws.GOLDEN / "qwen3_moe").iterdir())


def config(name: str) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=208,
        hidden_size=96,
        intermediate_size=160,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=20,
        moe_intermediate_size=56,
        num_experts=16,
        num_experts_per_tok=3,
        router_aux_loss_coef=0.3,
        initializer_range=0.05,
        **{"num_hidden_layers": 4, **CONFIGS[name]},
    )


@functools.cache
def one_device(name: str) -> dict:
    return laws.run(config(name), rules.table(), None)


@pytest.mark.parametrize("batch", ["padded", "packed"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case: Path, batch: str) -> None:
    laws.parity(case, batch)


@pytest.mark.parametrize("mesh", ["expert 2 x sequence 2 x data 2"])
def test_equivalence(mesh: str) -> None:
    laws.equivalence(config("every other layer"), rules.table(), mesh, one_device("every other layer"))


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize("mesh", MESHES)
def test_equivalence_of_every_variant(mesh: str, attention: str, name: str) -> None:
    laws.equivalence(config(name), rules.table(attention), mesh, one_device(name))


def test_isolation() -> None:
    laws.isolation(config("every other layer"))


@pytest.mark.parametrize(
    "mesh",
    [
        "expert 4 x data 2",
        pytest.param("expert 8", marks=pytest.mark.full),
        pytest.param("expert 2 x sequence 2 x data 2", marks=pytest.mark.full),
        pytest.param("expert 2 x tensor 2 x sequence 2", marks=pytest.mark.full),
    ],
)
def test_all_to_all_with_room_for_all_is_exact(mesh: str) -> None:
    table = rules.table(moe="all_to_all", capacity=16)
    laws.equivalence(config("every other layer"), table, mesh, one_device("every other layer"))


# With no weight on text, all there is to learn is the balance of the experts' load.
def balance_alone(**options: Any) -> dict:
    arrays = packed_arrays(vocab=208, rows=16)
    arrays["weights"][:] = 0
    loss = RouterLoss(coefficient=1.0, z_coefficient=0.1)
    return laws.run(config("all layers"), rules.table(), arrays=arrays, router_loss=loss, steps=1, **options)


@pytest.mark.parametrize(
    ("mesh", "accumulation"),
    [
        (None, 4),
        ("expert 2 x sequence 2 x data 2", 2),
        pytest.param(None, 2, marks=pytest.mark.full),
        pytest.param("expert 4 x data 2", 1, marks=pytest.mark.full),
        pytest.param("expert 2 x sequence 2 x data 2", 4, marks=pytest.mark.full),
    ],
)
def test_the_balance_loss_depends_neither_on_micro_batches_nor_on_the_mesh(mesh: str | None, accumulation: int) -> None:
    expected, found = alone(), balance_alone(mesh_name=mesh, accumulation=accumulation)
    assert expected["grad_norms"][0] > 0.01
    np.testing.assert_allclose(
        found["losses"] + found["grad_norms"], expected["losses"] + expected["grad_norms"], rtol=1e-5
    )
    for path, gradient in expected["gradients"].items():
        if path.endswith("router.kernel"):
            assert np.abs(found["gradients"][path] - gradient).max() <= 1e-5 * np.abs(gradient).max()
            assert np.abs(gradient).max() > 1e-3


@functools.cache
def alone() -> dict:
    return balance_alone(mesh_name=None)


def test_no_gradient_is_zero() -> None:
    """Every expert has tokens here, and so have all its weights a gradient; of a table, the rows of the tokens met."""
    for path, gradient in one_device("all layers")["gradients"].items():
        if not path.startswith("embed_tokens"):
            assert (gradient != 0).mean() > 0.99, path


def test_what_stands_in_padding_is_of_no_account() -> None:
    """Rows that end in padding, in micro-batches: another token there changes no bit."""
    runs = []
    for token in (0, 7):
        arrays = packed_arrays(vocab=208)
        arrays["tokens"][arrays["segment_ids"] == 0] = token
        assert (arrays["segment_ids"] == 0).any()
        runs.append(laws.run(config("all layers"), rules.table(), None, arrays=arrays, accumulation=2, steps=1))
    for path, gradient in runs[0]["gradients"].items():
        np.testing.assert_array_equal(runs[1]["gradients"][path], gradient, err_msg=path)


def numbered_experts(folder: Path, *, fused: bool) -> dict[str, np.ndarray]:
    """A checkpoint in which every value of expert e is e + 1, times a number of its tensor, in one of two layouts."""
    config = Qwen3MoeConfig(
        vocab_size=24,
        hidden_size=8,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
        moe_intermediate_size=12,
        num_experts=4,
        num_experts_per_tok=2,
    )
    model = config.build(rngs=nnx.Rngs(0))
    hf.save(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for number, kind in enumerate(("gate", "up", "down"), 1):
        for layer in range(2):
            for expert in range(4):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight"
                tensors[name] = np.full_like(tensors[name], number * 10 + expert + 100 * layer)
    if fused:
        for layer in range(2):
            names = {
                kind: [f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight" for expert in range(4)]
                for kind in ("gate", "up", "down")
            }
            gate, up, down = (np.stack([tensors.pop(name) for name in names[kind]]) for kind in ("gate", "up", "down"))
            tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
            tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("mesh", [None, "expert 2 x sequence 2 x data 2", "expert 4 x data 2"])
@pytest.mark.parametrize("fused", [False, True], ids=["a tensor each", "fused"])
def test_every_expert_comes_back_as_itself(fused: bool, mesh: str | None, tmp_path: Path) -> None:
    tensors = numbered_experts(tmp_path / "in", fused=fused)
    table = rules.table()
    with on(mesh, table) as devices:
        model = hf.load(models.family_of(tmp_path / "in"), tmp_path / "in", mesh=devices, rules=table)
        kernel = parameters.split(model)[1]["stacks.0.blocks.0.mlp.experts.gate_up_kernel"]
        assert kernel.shape == (2, 4, 8, 2, 12)
        expected = 100 * np.arange(2)[:, None, None] + np.arange(4)[:, None] + 10 * np.arange(1, 3)
        np.testing.assert_array_equal(kernel[:, :, 3, :, 5], expected)
        hf.save(model, tmp_path / "out", like=tmp_path / "in")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(tensors)
    for name, x in tensors.items():
        assert (written[name].shape, written[name].tobytes()) == (x.shape, x.tobytes()), name


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = numbered_experts(tmp_path / "in", fused=False)
    gone = "model.layers.1.mlp.experts.2.up_proj.weight"
    del tensors[gone]
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    with pytest.raises(UserError, match=f"1 tensors are missing: {gone}"):
        hf.load(Qwen3Moe, tmp_path / "in")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_spellings_of_a_config(case: Path, tmp_path: Path) -> None:
    new, hub = (json.loads((case / f"{name}.json").read_text()) for name in ("config", "config_hub_style"))
    assert Qwen3MoeConfig.from_hf(new) == Qwen3MoeConfig.from_hf(hub)
    shutil.copytree(case, tmp_path / "hub")
    shutil.copy(case / "config_hub_style.json", tmp_path / "hub" / "config.json")
    assert hf.load(Qwen3Moe, tmp_path / "hub").config == Qwen3MoeConfig.from_hf(new)


def test_stacks_are_as_few_blocks_as_can_be() -> None:
    def planned(kinds: str) -> list[tuple[str, int]]:
        plans = plan_stacks(kinds, lambda kind: lambda rngs: kind, [None] * len(kinds))
        return [("".join(make(None) for make in plan.pattern), plan.repeats) for plan in plans]

    assert planned("EEEEEE") == [("E", 6)]
    assert planned("DEDEDE") == [("DE", 3)]
    assert planned("DDDEEEEE") == [("D", 3), ("E", 5)]
    assert planned("DEDEDEEEE") == [("DE", 3), ("E", 3)]


def test_numbers_that_make_no_model_are_refused() -> None:
    with pytest.raises(UserError, match=r"num_experts_per_tok = 9 must lie in 1..8, the number of experts"):
        Qwen3MoeConfig(num_experts=8, num_experts_per_tok=9)
    tiny = Qwen3MoeConfig(num_hidden_layers=1, mlp_only_layers=(0,), vocab_size=8, hidden_size=64)
    with pytest.raises(UserError, match="a loss for the router is given, but no layer has experts"):
        parameters.abstract_model(tiny, router_loss=RouterLoss())
