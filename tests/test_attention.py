"""Attention against float64 numpy; packing, memory, skipped blocks, and the layout on eight devices."""

import contextlib
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
from omnijax.nn.attention import attention, chosen_kernel, reference, use_kernel
from omnijax.nn.blockwise import blockwise
from omnijax.sharding import Rules, lines, use
from tests.attention_cases import (
    QUICK,
    SCALE,
    arrays,
    assert_close,
    collectives,
    count,
    golden,
    rules,
    segments,
    value_and_gradients,
)

BLOCKS = [
    {"query_block": 256, "key_block": 256},
    {"query_block": 16, "key_block": 8},
    {"query_block": 7, "key_block": 64},
]
CASES = {
    "grouped heads": ({}, False, None),
    "grouped heads, sinks": ({}, True, None),
    "grouped heads, soft cap": ({}, False, 1.5),
    "equal heads": ({"H": 3, "K": 3}, True, 1.5),
    "one key head": ({"H": 4, "K": 1, "Dv": 11}, True, 1.5),
    "one token": ({"S": 1}, True, 1.5),
    "seven tokens": ({"S": 7}, True, None),
    "many blocks": ({"S": 129, "B": 3, "H": 2, "K": 1}, True, 1.5),
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_golden(case):
    shape, with_sinks, soft_cap = CASES[case]
    q, k, v, d_out, sinks = arrays(**shape)
    sinks = sinks if with_sinks else None
    span = spans.window(spans.causal(segments(*q.shape[:2])), 11)
    want = golden(q, k, v, span, sinks, d_out, soft_cap)
    assert_close(value_and_gradients(reference, q, k, v, span, sinks, d_out, soft_cap), want, 5e-6)
    for blocks in BLOCKS:
        assert_close(value_and_gradients(blockwise, q, k, v, span, sinks, d_out, soft_cap, **blocks), want, 5e-6)


@pytest.mark.parametrize(("S", "T"), [(33, 5), (40, 90)])
def test_cross_lengths_and_any_interval(S, T):
    """Intervals that no builder makes: neither sorted nor overlapping, some reversed, some beyond the keys."""
    q, k, v, d_out, sinks = arrays(S=S, T=T)
    random = np.random.default_rng(1)
    span = tuple(jnp.asarray(random.integers(-3, T + 4, (2, S)), jnp.int32) for _ in range(2))
    want = golden(q, k, v, span, sinks, d_out, None)
    assert_close(value_and_gradients(reference, q, k, v, span, sinks, d_out), want, 5e-6)
    for blocks in BLOCKS:
        assert_close(value_and_gradients(blockwise, q, k, v, span, sinks, d_out, **blocks), want, 5e-6)


@pytest.mark.parametrize("kernel", [reference, blockwise])
def test_bfloat16(kernel):
    """Statistics in float32: the error is that of rounding weights, gradients and results, a few 2**-8."""
    q, k, v, d_out, sinks = arrays(S=129, dtype=jnp.bfloat16)
    span = spans.causal(segments(2, 129))
    blocks = {} if kernel is reference else {"query_block": 32, "key_block": 16}
    got = value_and_gradients(kernel, q, k, v, span, sinks, d_out, **blocks)
    assert [x.dtype for x in got] == [jnp.bfloat16] * 4 + [jnp.float32]
    assert_close(got, golden(q, k, v, span, sinks, d_out, None), 3 * 2**-8)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kernel", [reference, blockwise])
def test_padding_is_exactly_zero(kernel, with_sinks):
    q, k, v, d_out, sinks = arrays()
    segment_ids = segments(2, 33).at[0].set(0)
    got = value_and_gradients(kernel, q, k, v, spans.causal(segment_ids), sinks if with_sinks else None, d_out)
    padding = np.asarray(segment_ids) == 0
    for x in got[:4]:
        assert np.isfinite(x).all()
        assert not np.asarray(x)[padding].any()


@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_documents_are_isolated(kernel):
    """Document 2 stands across a block's edge: neither its output nor its gradient knows of the others."""
    q, k, v, _, _ = arrays(S=300)
    segment_ids = jnp.asarray(np.repeat([1, 2, 3], 100)[None].repeat(2, 0), jnp.int32)
    second = slice(200, 300)

    def output(q, k, v):
        return attention(q, k, v, spans.document(segment_ids), scale=SCALE)

    with use_kernel(kernel):
        before = jax.jit(output)(q, k, v)
        after = jax.jit(output)(*(x.at[:, 150].mul(-50) for x in (q, k, v)))
        gradients = jax.jit(jax.grad(lambda *x: output(*x)[:, second].sum(), (0, 1, 2)))(q, k, v)
    assert np.array_equal(before[:, second], after[:, second])
    assert not np.array_equal(before[:, 100:200], after[:, 100:200])
    assert all(not np.asarray(x)[:, :200].any() and np.asarray(x)[:, second].any() for x in gradients)


@pytest.mark.parametrize(
    ("kernel", "layout"),
    [
        ("reference", None),
        ("blockwise", None),
        ("reference", "ulysses"),
        ("blockwise", "ulysses"),
        ("blockwise", "ring"),
    ],
)
def test_packed_documents_equal_documents_alone(kernel, layout):
    """Of a row [A, B], each part equals its document alone, and a token of A moves no bit of B."""
    q, k, v, _, sinks = arrays(B=1, S=48, H=8)
    edge = 21  # inside a device's part of the row

    def run(q, k, v, segment_ids):
        span = spans.causal(jnp.asarray([segment_ids], jnp.int32))
        return jax.jit(lambda *x: attention(*x, span, scale=SCALE, sinks=sinks), compiler_options=QUICK)(q, k, v)

    with use_kernel(kernel):
        alone = [run(*x, [1] * x[0].shape[1]) for x in zip(*(jnp.split(x, [edge], 1) for x in (q, k, v)), strict=True)]
        with use(make_mesh(data=1, sequence=8), rules(layout)) if layout else contextlib.nullcontext():
            packed = run(q, k, v, [1] * edge + [2] * (48 - edge))
            changed = run(*(x.at[:, 4].mul(-50) for x in (q, k, v)), [1] * edge + [2] * (48 - edge))
    np.testing.assert_allclose(packed, jnp.concatenate(alone, 1), rtol=0, atol=2e-6)
    assert np.array_equal(packed[:, edge:], changed[:, edge:])
    assert not np.array_equal(packed[:, :edge], changed[:, :edge])


def test_dead_blocks_are_skipped_in_each_row():
    """A block that was visited would spread its NaN, be its weights 0 or not."""
    q, k, v, d_out, _ = arrays(S=64)
    segment_ids = np.zeros((2, 64), np.int32)
    segment_ids[0, :16] = segment_ids[1, 32:48] = 1
    dead = jnp.asarray(segment_ids == 0)[:, :, None, None]
    k, v = (jnp.where(dead, jnp.nan, x) for x in (k, v))
    span = spans.causal(jnp.asarray(segment_ids))
    blocks = {"query_block": 16, "key_block": 16}
    assert all(np.isfinite(x).all() for x in value_and_gradients(blockwise, q, k, v, span, None, d_out, **blocks)[:4])
    assert np.isnan(value_and_gradients(blockwise, q, k, v, span, None, d_out)[0]).any()


def test_spans_equal_brute_force():
    segment_ids = segments(4, 50)
    index = range(50)
    for window in (None, 1, 4, 2**31 - 1):
        for build, is_causal in ((spans.document, False), (spans.causal, True)):
            start, end = span = build(segment_ids)
            if window is not None:
                start, end = spans.window(span, window)
            for row, starts, ends in zip(np.asarray(segment_ids), np.asarray(start), np.asarray(end), strict=True):
                for i in index:
                    document = {i}  # the run of equal ids around i
                    for step in (-1, 1):
                        j = i
                        while 0 <= j < 50 and row[j] == row[i]:
                            document.add(j)
                            j += step
                    seen = {j for j in document if row[i] and not (is_causal and j > i)}
                    seen = {j for j in seen if window is None or j > i - window}
                    assert set(range(starts[i], ends[i])) == seen


def test_window_can_be_scanned():
    segment_ids = segments(2, 20)
    sizes = jnp.asarray([3, 2**31 - 1], jnp.int32)
    _, scanned = jax.lax.scan(lambda _, size: (None, spans.window(spans.causal(segment_ids), size)), None, sizes)
    for layer, size in enumerate([3, 20]):
        for got, want in zip(scanned, spans.window(spans.causal(segment_ids), size), strict=True):
            assert np.array_equal(got[layer], want)


@pytest.mark.parametrize("with_windows", [False, True])
def test_memory_is_linear_in_length(with_windows):
    """Also inside a scan over layers, from which partial evaluation likes to move the masks and stack them."""

    def compiled(length):
        def loss(x, segment_ids):
            span = spans.causal(segment_ids)

            @jax.checkpoint
            def layer(x, window):
                q = x.reshape(1, length, 2, 16)
                limited = spans.window(span, window) if with_windows else span
                out = attention(q, q[:, :, :1], q[:, :, 1:], limited, scale=SCALE)
                return x + out.reshape(x.shape), None

            return jax.lax.scan(layer, x, jnp.asarray([128, length] * 2, jnp.int32))[0].sum()

        x = jax.ShapeDtypeStruct((1, length, 32), jnp.bfloat16)
        segment_ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
        lowered = jax.jit(jax.grad(loss)).lower(x, segment_ids)
        return lowered.compile(QUICK)

    short, long = compiled(4096), compiled(16384)
    assert long.memory_analysis().temp_size_in_bytes < 5 * short.memory_analysis().temp_size_in_bytes
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"\w\d*\[([\d,]+)\]", long.as_text())]
    assert max(sizes) < 16384**2 / 16


def on_mesh(mesh_sizes, H, K, sinks=None, kernel="blockwise", B=2, S=56):
    """Programs of the forward pass and of output and gradients, with arguments laid out as a model's are."""
    q, k, v, d_out, _ = arrays(B=B, S=S, H=H, K=K)
    segment_ids = segments(B, S)

    def forward(q, k, v, segment_ids, sinks):
        return attention(q, k, v, spans.causal(segment_ids), scale=SCALE, sinks=sinks)

    def backward(q, k, v, segment_ids, sinks, d_out):
        out, pull = jax.vjp(lambda *x: forward(*x[:3], segment_ids, x[3]), q, k, v, sinks)
        return out, *pull(d_out)

    with use_kernel("reference"):
        want = jax.jit(backward)(q, k, v, segment_ids, sinks, d_out)
    mesh = make_mesh(**mesh_sizes)
    rows = ("replica", "data", "expert")
    tokens = NamedSharding(mesh, PartitionSpec(rows, "sequence"))
    heads = NamedSharding(mesh, PartitionSpec(rows, "sequence", "tensor"))
    kv_heads = heads if K % mesh.shape["tensor"] == 0 else tokens
    whole = NamedSharding(mesh, PartitionSpec())
    inputs = (heads, kv_heads, kv_heads, tokens, whole)
    with use(mesh, rules()), use_kernel(kernel):
        arguments = [jax.device_put(x, s) for x, s in zip((q, k, v, segment_ids, sinks), inputs, strict=True)]
        program = jax.jit(forward, out_shardings=heads).lower(*arguments).compile(QUICK)
        arguments.append(jax.device_put(d_out, heads))
        outputs = (heads, heads, kv_heads, kv_heads, whole)
        gradient_program = jax.jit(backward, out_shardings=outputs).lower(*arguments).compile(QUICK)
        assert_close(gradient_program(*arguments), want, 1e-5)
    return collectives(program), collectives(gradient_program)


@pytest.mark.parametrize(
    ("mesh_sizes", "H", "K", "kernel"),
    [
        ({"data": 4, "sequence": 2}, 6, 3, "blockwise"),
        ({"data": 2, "sequence": 2, "tensor": 2}, 12, 4, "reference"),
        ({"data": 2, "sequence": 2, "tensor": 2}, 12, 4, "blockwise"),
        ({"data": 2, "sequence": 2, "tensor": 2}, 8, 2, "blockwise"),
        ({"data": 1, "sequence": 8}, 8, 2, "blockwise"),
        ({"data": 1, "sequence": 8}, 16, 2, "blockwise"),
    ],
)
def test_ulysses(mesh_sizes, H, K, kernel):
    forward, backward = on_mesh(mesh_sizes, H, K, kernel=kernel, B=4)
    assert count(forward, "all-to-all") == 4
    assert count(backward, "all-to-all") == 8
    for found in (forward, backward):
        others = [(kind, shape) for shape, kind in found if kind != "all-to-all"]
        assert [kind for kind, _ in others] == ["all-gather"]  # of segment_ids, once
        assert others[0][1].startswith("s32[")


def test_sinks_on_mesh_add_one_small_all_reduce():
    sinks = arrays(H=8)[-1]
    _, backward = on_mesh({"data": 2, "sequence": 2, "tensor": 2}, 8, 4, sinks)
    assert count(backward, "all-to-all") == 8
    assert [shape for shape, kind in backward if kind == "all-reduce"] == ["f32[2]{0}"]
    assert count(backward, "collective-permute") == 0


@pytest.mark.parametrize(
    ("mesh_sizes", "H", "K"),
    [({"data": 2, "tensor": 4}, 8, 4), ({"data": 2, "expert": 4}, 6, 2), ({"replica": 2, "data": 4}, 3, 3)],
)
def test_no_sequence_axis_no_collective(mesh_sizes, H, K):
    assert on_mesh(mesh_sizes, H, K, B=8) == ([], [])


def test_few_key_heads_under_tensor():
    """Each key head serves two devices, which add up its gradient: the forward pass has no collective."""
    forward, _ = on_mesh({"data": 2, "tensor": 4}, 8, 2)
    assert forward == []


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("manual", [{"data"}, {"data", "sequence", "tensor"}])
def test_inside_a_manual_region(manual, check_vma):
    """What is manual already is left alone, what is not is Ulysses' still."""
    q, k, v, d_out, sinks = arrays(B=4, S=16, H=8, K=4)
    segment_ids = segments(4, 16)

    def loss(q, k, v, sinks, segment_ids, d_out):
        return (attention(q, k, v, spans.causal(segment_ids), scale=SCALE, sinks=sinks) * d_out).sum()[None]

    heads = ("tensor", "sequence") if "tensor" in manual else None
    split, summed = PartitionSpec("data", None, heads), ("data", *(heads or ()))
    region = jax.shard_map(
        loss,
        in_specs=(split, split, split, PartitionSpec(heads), PartitionSpec("data"), split),
        out_specs=PartitionSpec(summed),
        axis_names=manual,
        check_vma=check_vma,
    )
    want = jax.jit(jax.grad(lambda *x: loss(*x, segment_ids, d_out).sum(), (0, 1, 2, 3)))(q, k, v, sinks)
    with use(make_mesh(data=2, sequence=2, tensor=2), rules()):
        got = jax.jit(jax.grad(lambda *x: region(*x, segment_ids, d_out).sum(), (0, 1, 2, 3)))(q, k, v, sinks)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_refusals():
    def trace(mesh_sizes, H, K, table=None):
        q, k, v, _, _ = arrays(S=64, H=H, K=K)
        span = spans.causal(segments(2, 64))
        with use(make_mesh(**mesh_sizes), table or rules()) if mesh_sizes else contextlib.nullcontext():
            jax.eval_shape(lambda *x: attention(*x, span, scale=SCALE), q, k, v)

    with pytest.raises(UserError, match=r"6 query heads are not a multiple of 8 = lcm\(2 key/value heads, 8 parts"):
        trace({"data": 1, "sequence": 8}, 6, 2)
    with pytest.raises(UserError, match=r"12 query heads are not a multiple of 24 = lcm\(3 key/value heads, 8 parts"):
        trace({"data": 1, "sequence": 8}, 12, 3)
    with pytest.raises(UserError, match=r"6 query heads are not a multiple of 4 = lcm\(2 key/value heads, 4 parts"):
        trace({"data": 2, "sequence": 4}, 6, 2)
    with pytest.raises(UserError, match=r"5 query heads are not a multiple of 2 = lcm\(2 key/value heads, 1 parts"):
        trace(None, 5, 2)
    table = {"batch": "data", "length": "sequence", "act_heads": "none", "attention_heads": "none"}
    split = Rules(parameters=(), activations=lines(**table, attention_length="sequence"))
    with pytest.raises(UserError, match='the table splits them over sequence; write attention_length="none"'):
        trace({"data": 1, "sequence": 8}, 8, 8, split)
    with pytest.raises(UserError, match="kernel 'flash' does not exist; choose one of auto, reference, blockwise"):
        use_kernel("flash").__enter__()


def test_kernel_enters_the_cache_key():
    traced = []

    @jax.jit
    def run(q, k, v):
        traced.append(chosen_kernel())
        return attention(q, k, v, spans.causal(segments(2, 33)), scale=SCALE)

    q, k, v, _, _ = arrays()
    run(q, k, v)
    with use_kernel("reference"):
        run(q, k, v)
    run(q, k, v)
    assert traced == ["blockwise", "reference"]
