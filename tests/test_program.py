"""What XLA made of a train step: read from the compiled program."""

import collections
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.layers import GatedExperts
from models.qwen3 import Qwen3Config
from models.qwen3_moe import Qwen3MoeConfig
from omnijax import parameters
from omnijax.batch import Batch
from omnijax.nn.grouped import BLOCKS
from omnijax.nn.moe import MixtureOfExperts
from omnijax.nn.remat import Remat
from omnijax.nn.router import Router, softmax_then_top
from omnijax.sharding import ExpertLayout, Rules, constrain
from omnijax.step import init_state, state_shardings, train_step
from sharding_rules import qwen3 as rules
from sharding_rules import qwen3_moe as moe_rules
from tests.meshes import MESHES, on

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


def compiled_step(mesh_name: str, remat: Remat, rows: int = 2, table: Rules | None = None, config: Any = CONFIG) -> str:
    """The optimised program of a step of SGD in float32, of two rows; nothing is run."""
    table = table or rules.table()
    with on(mesh_name, table) as mesh:
        model = parameters.abstract_model(config, remat=remat)
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


def test_ulysses_in_chunks_exchanges_as_much_in_more_pieces() -> None:
    """Two groups of heads: twice the all-to-alls, and none waits for the attention of another group."""
    whole, cut = (compiled_step("sequence 4 x data 2", "none", table=rules.table(chunks=n)) for n in (1, 2))
    assert collectives(cut)["all-to-all"] == 2 * collectives(whole)["all-to-all"] == 16
    assert collectives(cut)["collective-permute"] == 0


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


EXPERTS = Qwen3MoeConfig(
    vocab_size=104,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=12,
    moe_intermediate_size=28,
    num_experts=16,
    num_experts_per_tok=3,
)


@pytest.mark.parametrize("moe", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("mesh", ["expert 4 x data 2", "expert 2 x sequence 2 x data 2"])
def test_no_gradient_of_experts_or_attention_is_reduced_whole(mesh: str, moe: ExpertLayout) -> None:
    """Experts' gradients are reduced to the part each device holds, and activations' not at all."""
    program = compiled_step(mesh, "full", rows=8, table=moe_rules.table(moe=moe), config=EXPERTS)
    held = {16 // MESHES[mesh]["expert"], 16}
    for shape, kind in COLLECTIVE.findall(program):
        if kind == "all-reduce":
            assert not is_activation(shape), f"{kind} of an activation: {shape}"
            for sizes in re.findall(r"f32\[([\d,]+)\]", shape):
                sizes = [int(size) for size in sizes.split(",")]
                assert not (held & set(sizes) and 28 in sizes), f"{kind} of experts' weights: {shape}"
    assert collectives(program)["reduce-scatter"] >= 2


def test_the_router_works_on_a_devices_own_tokens() -> None:
    """The layer's matrix products, apart from those of experts' blocks, are an eighth of one device's on eight."""

    def products(mesh_name: str | None) -> int:
        table = moe_rules.table()
        with on(mesh_name, table):
            layer = MixtureOfExperts(
                router=Router(
                    width=48,
                    experts=12,
                    std=0.1,
                    select=functools.partial(softmax_then_top, top_k=3, renormalise=True),
                    rngs=nnx.Rngs(0),
                ),
                experts=GatedExperts(width=48, hidden=28, experts=12, std=0.1, rngs=nnx.Rngs(0)),
            )
            graphdef, params = parameters.split(layer)

            def loss(params, x, real):
                y, routing = parameters.merge(graphdef, params)(constrain(x, "batch", "length", "act_embed"), real)
                return (y**2).sum() + routing.balance

            x, real = jnp.ones((8, 640, 48)), jnp.ones((8, 640), bool)
            program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x, real).compile().as_text()
        found = dot_operations(program)
        blocks = [key for key in found if key[0] in BLOCKS or key[-1] in BLOCKS]
        assert len(blocks) >= 6 * len(BLOCKS)
        return sum(count for key, count in found.items() if key not in blocks)

    # The router's product and its two gradients: tokens x width x experts each.
    assert products(None) == 3 * 8 * 640 * 48 * 12
    assert products("expert 4 x data 2") == 3 * 640 * 48 * 12


def dot_operations(program: str) -> collections.Counter:
    """Multiply-adds of the matrix products written in a program, by (rows, columns, contracted)."""
    shapes = {
        name: [int(size) for size in sizes.split(",") if size]
        for name, sizes in re.findall(r"%([\w.-]+) = \w+\[([\d,]*)\]", program)
    }
    shapes |= {
        name: [int(size) for size in sizes.split(",") if size]
        for name, sizes in re.findall(r"([\w.-]+): \w+\[([\d,]*)\]", program)
    }
    found: collections.Counter = collections.Counter()
    pattern = r"= \w+\[([\d,]*)\]\S* dot\((?:\S+ )?%([\w.-]+), .*?lhs_contracting_dims=\{([\d,]+)\}"
    for sizes, left, dims in re.findall(pattern, program):
        result = [int(size) for size in sizes.split(",") if size]
        contracted = math.prod(shapes[left][int(dim)] for dim in dims.split(","))
        found[(*result, contracted)] += math.prod(result) * contracted
    return found


def test_experts_and_their_moments_exist_once() -> None:
    table = moe_rules.table()
    with on("expert 2 x sequence 2 x data 2", table) as mesh:
        model = parameters.build_model(EXPERTS, mesh, table)
        state = init_state(model, optax.adam(0.1), mesh, table)
        arrays = {
            f"{where}{path}": x
            for where, tree in (("", state.params), ("mu ", state.opt_state[0].mu))
            for path, x in tree.items()
        }
        for path, x in arrays.items():
            if ".experts." in path:
                assert len({str(shard.index) for shard in x.addressable_shards}) == 8, path
