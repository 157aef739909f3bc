"""Ring attention equals one device on every mesh, and communicates exactly its keys, values and their gradients."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from omnijax.errors import UserError
from omnijax.mesh import make_mesh
from omnijax.nn import spans
from omnijax.nn.attention import attention, use_kernel
from omnijax.nn.blockwise import blockwise
from omnijax.sharding import constrain, use
from tests.attention_cases import (
    QUICK,
    SCALE,
    arrays,
    assert_close,
    collectives,
    golden,
    rules,
    segments,
    value_and_gradients,
)
from tests.meshes import MESHES

RINGS = ["sequence 8", "sequence 4 x data 2", "data 2 x sequence 2 x tensor 2"]
B, S = 4, 80
SMALL_BLOCKS = {"query_block": 4, "key_block": 3}  # several on each device, which do not divide its part


def any_interval(keys):
    """Intervals that no builder makes: neither sorted nor overlapping, some reversed, some beyond the keys."""
    random = np.random.default_rng(1)
    return tuple(jnp.asarray(random.integers(-3, keys + 4, (B, S)), jnp.int32) for _ in range(2))


SPANS = {
    "causal": lambda: spans.causal(segments(B, S)),
    "window": lambda: spans.window(spans.causal(segments(B, S)), 11),
    "one long document": lambda: spans.causal(jnp.ones((B, S), jnp.int32)),
    "whole documents": lambda: spans.document(segments(B, S)),
    "fewer keys": lambda: any_interval(40),
    "more keys": lambda: any_interval(120),
}
KEYS = {"fewer keys": 40, "more keys": 120}


def on(mesh_name, attention_layout="ring"):
    return use(make_mesh(**MESHES[mesh_name]), rules(attention_layout))


# Every span on one of the meshes; the rest of the product is marked `full`.
CASES = [
    pytest.param(mesh, span, marks=() if (number - place) % len(RINGS) == 0 else pytest.mark.full)
    for number, span in enumerate(SPANS)
    for place, mesh in enumerate(RINGS)
]


@pytest.mark.parametrize(("mesh", "span"), CASES)
def test_equals_one_device(mesh, span):
    """Output and gradients of packed rows whose documents stand across the edges of the devices' parts."""
    q, k, v, d_out, sinks = arrays(B=B, S=S, T=KEYS.get(span), H=4, K=2)
    arguments = (q, k, v, SPANS[span](), sinks, d_out, 1.5)
    want = golden(*arguments)
    with on(mesh):
        assert_close(value_and_gradients(attention, *arguments), want, 1e-5)
        assert_close(value_and_gradients(blockwise, *arguments, **SMALL_BLOCKS), want, 1e-5)


@pytest.mark.parametrize(
    ("mesh", "H", "K"), [("sequence 8", 3, 1), ("sequence 8", 6, 3), ("data 2 x sequence 2 x tensor 2", 6, 3)]
)
def test_heads_that_the_sequence_axis_does_not_divide(mesh, H, K):
    q, k, v, d_out, _ = arrays(B=B, S=S, H=H, K=K)
    span = SPANS["causal"]()
    with on(mesh):
        got = value_and_gradients(attention, q, k, v, span, None, d_out)
    assert_close(got, golden(q, k, v, span, None, d_out, None), 1e-5)


def test_bfloat16():
    """As exact as on one device: partial results and travelling gradients are float32."""
    q, k, v, d_out, sinks = arrays(B=B, S=S, H=4, dtype=jnp.bfloat16)
    span = SPANS["one long document"]()
    with on("sequence 8"):
        got = value_and_gradients(attention, q, k, v, span, sinks, d_out)
    assert [x.dtype for x in got] == [jnp.bfloat16] * 4 + [jnp.float32]
    assert_close(got, golden(q, k, v, span, sinks, d_out, None), 3 * 2**-8)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_padding_is_exactly_zero(with_sinks):
    """Also in a row of padding alone, and on devices that hold nothing else."""
    q, k, v, d_out, sinks = arrays(B=B, S=S, H=4)
    segment_ids = segments(B, S).at[0].set(0).at[1, 30:].set(0)
    span = spans.causal(segment_ids)
    with on("sequence 8"):
        got = value_and_gradients(attention, q, k, v, span, sinks if with_sinks else None, d_out)
    padding = np.asarray(segment_ids) == 0
    for x in got[:4]:
        assert np.isfinite(x).all()
        assert not np.asarray(x)[padding].any()


def test_documents_are_isolated():
    """Document 2 stands on three devices, two of which hold others too: no gradient reaches those."""
    q, k, v, _, _ = arrays(B=B, S=S, H=4)
    second = slice(15, 37)
    segment_ids = jnp.ones((B, S), jnp.int32).at[:, second].set(2).at[:, second.stop :].set(3)

    def loss(q, k, v):
        return attention(q, k, v, spans.document(segment_ids), scale=SCALE)[:, second].sum()

    with on("sequence 8"):
        gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    for x in map(np.asarray, gradients):
        assert x[:, second].any()
        assert not x[:, : second.start].any()
        assert not x[:, second.stop :].any()


def test_visitors_that_no_query_sees_cost_no_attention():
    """A block that was visited would spread its NaN, be its weights 0 or not."""
    q, k, v, d_out, _ = arrays(B=B, S=S, H=4)
    segment_ids = jnp.zeros((B, S), jnp.int32).at[:, 10:30].set(1).at[:, 50:60].set(2)
    dead = (segment_ids == 0)[:, :, None, None]
    k, v = (jnp.where(dead, jnp.nan, x) for x in (k, v))
    span = spans.causal(segment_ids)
    with on("sequence 8"):
        got = value_and_gradients(blockwise, q, k, v, span, None, d_out, query_block=5, key_block=5)
    assert all(np.isfinite(x).all() for x in got[:4])


def compiled(mesh_name, length, *, heads=4, kv_heads=2, gradient=False):
    """The program of a scan over two layers, of a full and a windowed one, and its arguments laid out as a model's."""

    def loss(x, segment_ids):
        span = spans.causal(segment_ids)

        @jax.checkpoint
        def layer(x, window):
            q = constrain(x, "batch", "length", "act_heads", None)
            k, v = x[:, :, :kv_heads], x[:, :, kv_heads : 2 * kv_heads]
            return x + attention(q, k, v, spans.window(span, window), scale=SCALE), None

        return jax.lax.scan(layer, x, jnp.asarray([128, length], jnp.int32))[0].sum()

    with on(mesh_name):
        mesh = jax.sharding.get_mesh()
        tokens = NamedSharding(mesh, PartitionSpec(("replica", "data", "expert"), "sequence"))
        x = jax.ShapeDtypeStruct((2, length, heads, 16), jnp.float32, sharding=tokens)
        segment_ids = jax.ShapeDtypeStruct((2, length), jnp.int32, sharding=tokens)
        return jax.jit(jax.grad(loss) if gradient else loss).lower(x, segment_ids).compile(QUICK)


def permuted(program):
    """Shapes of what is handed on; everything else that communicates is an integer or one number."""
    found = collectives(program)
    for shape, kind in found:
        small = shape.startswith("s32[") or (kind == "all-reduce" and shape == "f32[]")
        assert kind == "collective-permute" or small, f"{kind} of {shape}"
    return [shape.split("{")[0] for shape, kind in found if kind == "collective-permute"]


def test_the_ring_hands_on_keys_values_and_their_gradients_alone():
    """The program holds each once, in the loop over rounds in the scan over layers."""
    part = "f32[2,64,2,16]"  # of two rows on one of eight devices: 64 tokens and both key heads
    assert permuted(compiled("sequence 8", 512)) == [part] * 2
    # k, v; again where the layer is recomputed; k, v, dk, dv; and at the end dk and dv home.
    assert permuted(compiled("sequence 8", 512, gradient=True)) == [part] * 10


def test_gradient_memory_is_linear_in_length():
    short, long = (compiled("sequence 8", length, gradient=True) for length in (4096, 16384))
    assert long.memory_analysis().temp_size_in_bytes < 5 * short.memory_analysis().temp_size_in_bytes
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"\w\d*\[([\d,]+)\]", long.as_text())]
    assert max(sizes) < 16384**2 / 64


def test_refusals():
    def trace(mesh, S, H, K, kernel="blockwise"):
        q, k, v, _, _ = arrays(B=8, S=S, H=H, K=K)
        with on(mesh), use_kernel(kernel):
            jax.eval_shape(lambda *x: attention(*x, spans.causal(segments(8, S)), scale=SCALE), q, k, v)

    with pytest.raises(UserError, match="reference needs all keys on one device, which a ring never has; choose"):
        trace("sequence 8", 64, 8, 8, kernel="reference")
    with pytest.raises(UserError, match=r"6 query heads are not a multiple of 4 = lcm\(2 .*, 4 parts of act_heads"):
        trace("tensor 4 x data 2", 64, 6, 2)
    with pytest.raises(UserError, match="axis 'length' of size 35 is not divided by sequence = 8; change the size"):
        trace("sequence 8", 35, 8, 8)
    with pytest.raises(UserError, match="layout: unknown attention 'flash'; one of ulysses, ring"):
        rules("flash")
