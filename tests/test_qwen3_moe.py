"""Qwen3 with experts: parity with transformers, and the laws."""

import functools
from pathlib import Path

import pytest

from models.qwen3_moe import Qwen3MoeConfig
from sharding_rules import qwen3_moe as rules
from tests import laws
from tests.meshes import MESHES

CONFIGS = {
    "all layers": {},
    "every other layer": {"decoder_sparse_step": 2, "norm_topk_prob": True},
    "all but one": {"mlp_only_layers": (1,), "norm_topk_prob": True},
}
CASES = sorted((laws.GOLDEN / "qwen3_moe").iterdir())


def config(name: str) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=208,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=20,
        moe_intermediate_size=56,
        num_experts=16,
        num_experts_per_tok=3,
        router_aux_loss_coef=0.3,
        initializer_range=0.05,
        **CONFIGS[name],
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
    laws.equivalence(config("all but one"), rules.table(), mesh, one_device("all but one"))


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize("mesh", MESHES)
def test_equivalence_of_every_variant(mesh: str, attention: str, name: str) -> None:
    laws.equivalence(config(name), rules.table(attention), mesh, one_device(name))


def test_isolation() -> None:
    laws.isolation(config("all but one"))
