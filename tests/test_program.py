"""What XLA made of a train step: read from the compiled program."""

import collections
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.qwen3 import Qwen3Config
from omnijax import parameters
from omnijax.batch import Batch
from omnijax.nn.remat import Remat
from omnijax.step import state_shardings, train_step
from sharding_rules import qwen3 as rules
from tests.meshes import on

LENGTH = 2048
CONFIG = Qwen3Config(
    vocab_size=104,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=12,
)
COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(")


def compiled_step(mesh_name: str, remat: Remat, rows: int = 2) -> str:
    """The optimised program of a step of SGD in float32, of two rows; nothing is run."""
    table = rules.table()
    with on(mesh_name, table) as mesh:
        model = parameters.abstract_model(CONFIG, remat=remat)
        optimizer = optax.sgd(0.1)
        shardings = state_shardings(model, optimizer, mesh, table)
        params = parameters.split(model)[1]
        step = train_step(model, optimizer, mesh, table, dtype=jnp.float32)
        integers = jax.ShapeDtypeStruct((rows, LENGTH), jnp.int32)
        weights = jax.ShapeDtypeStruct((rows, LENGTH), jnp.float32)
        batch = Batch(integers, integers, integers, integers, weights, integers)
        batch = split_rows(batch, mesh)
        state = type(shardings)(jax.ShapeDtypeStruct((), jnp.int32), params, jax.eval_shape(optimizer.init, params))
        state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)
        return step.lower(state, batch).compile().as_text()


def split_rows(batch: Batch, mesh: Mesh) -> Batch:
    sharding = NamedSharding(mesh, PartitionSpec(("replica", "data", "expert"), "sequence"))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch)


def collectives(program: str) -> collections.Counter:
    return collections.Counter(kind for _, kind in COLLECTIVE.findall(program))


# q, k, v to heads and the output back to tokens; the same four transposed in the backward pass; and the forward four
# once more where the layer is recomputed. The program holds each once, in the body of the scan over layers.
@pytest.mark.parametrize(("remat", "expected"), [("none", 8), ("full", 12)])
@pytest.mark.parametrize("mesh", ["sequence 8", "data 2 x sequence 2 x tensor 2"])
def test_ulysses_is_exactly_its_all_to_alls(mesh: str, remat: Remat, expected: int) -> None:
    program = compiled_step(mesh, remat)
    found = collectives(program)
    assert found["all-to-all"] == expected
    assert found["collective-permute"] == 0
    for shape, kind in COLLECTIVE.findall(program):
        assert not (kind == "all-gather" and is_activation(shape)), f"{kind} of an activation: {shape}"


@pytest.mark.parametrize("mesh", ["data 8", "replica 2 x data 4"])
def test_data_parallel_moves_no_activation(mesh: str) -> None:
    program = compiled_step(mesh, "none", rows=8)
    assert collectives(program)["all-to-all"] == 0
    assert collectives(program)["collective-permute"] == 0
    for shape, kind in COLLECTIVE.findall(program):
        assert not is_activation(shape), f"{kind} of an activation: {shape}"


def is_activation(shape: str) -> bool:
    """Whether a floating-point array of a collective has an axis as long as the row, or as a device's part of it."""
    parts = {LENGTH // n for n in (1, 2, 4, 8)}
    return any(
        parts & {int(size) for size in sizes.split(",") if size}
        for kind, sizes in re.findall(r"(f32|bf16)\[([\d,]*)\]", shape)
    )


@pytest.mark.parametrize("mesh", ["sequence 8", "data 2 x sequence 2 x tensor 2"])
def test_no_array_is_as_large_as_length_by_length(mesh: str) -> None:
    program = compiled_step(mesh, "full")
    sizes = re.findall(r"\b(?:pred|[a-z]\d+|bf16)\[([\d,]+)\]", program)
    largest = max(math.prod(int(size) for size in text.split(",")) for text in sizes)
    assert largest < LENGTH * LENGTH
