"""Attention against float64 numpy; packing, memory, skipped blocks, and the layout on eight devices."""

import contextlib
import functools
import itertools
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

SCALE = 0.3
QUICK = {"xla_backend_optimization_level": 0}  # these tests spend their time compiling
RULES = Rules(
    parameters=(),
    activations=lines(
        batch="replica data expert",
        length="sequence",
        act_heads="tensor",
        attention_length="none",
        attention_heads="tensor sequence",
    ),
)


def golden(q, k, v, span, sinks, d_out, soft_cap):
    """Output and gradients (q, k, v, sinks) by the chain rule, one row and head at a time, in float64."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    start, end = (np.asarray(bound)[:, :, None] for bound in span)
    out, dq, dk, dv, d_sinks = np.zeros_like(d_out), *(np.zeros_like(x) for x in (q, k, v)), np.zeros(q.shape[2])
    index = np.arange(k.shape[1])
    for b in range(q.shape[0]):
        seen = (start[b] <= index) & (index < end[b])
        for h in range(q.shape[2]):
            j = h // (q.shape[2] // k.shape[2])
            logits = SCALE * q[b, :, h] @ k[b, :, j].T
            slope = np.ones_like(logits)
            if soft_cap is not None:
                slope = 1 - np.tanh(logits / soft_cap) ** 2
                logits = soft_cap * np.tanh(logits / soft_cap)
            exponentials = np.where(seen, np.exp(logits), 0)
            sink = 0 if sinks is None else math.exp(sinks[h])
            total = exponentials.sum(-1, keepdims=True) + sink
            weights = np.divide(exponentials, total, out=np.zeros_like(exponentials), where=total > 0)
            out[b, :, h] = weights @ v[b, :, j]
            d_weights = d_out[b, :, h] @ v[b, :, j].T
            delta = (weights * d_weights).sum(-1, keepdims=True)
            d_logits = SCALE * weights * (d_weights - delta) * slope
            dq[b, :, h] = d_logits @ k[b, :, j]
            dk[b, :, j] += d_logits.T @ q[b, :, h]
            dv[b, :, j] += weights.T @ d_out[b, :, h]
            if sinks is not None:
                d_sinks[h] -= (sink / total * delta).sum()
    return out, dq, dk, dv, d_sinks


def arrays(B=2, S=33, T=None, H=6, K=2, Dk=8, Dv=5, dtype=jnp.float32):
    """q, k, v, the output's cotangent and sinks."""
    T, random = T or S, np.random.default_rng(0)
    shapes = (B, S, H, Dk), (B, T, K, Dk), (B, T, K, Dv), (B, S, H, Dv)
    q, k, v, d_out = (jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes)
    return q, k, v, d_out, jnp.asarray(random.standard_normal(H), jnp.float32)


def segments(B, S):
    """Packed rows: documents of growing lengths, whose ids need not rise, then padding (none in the first row)."""
    rows = np.zeros((B, S), np.int32)
    for b in range(B):
        edges = np.cumsum([0, *range(1 + b, S, 3)])
        edges = [*edges[edges < S], S]
        for document, (first, last) in enumerate(itertools.pairwise(edges)):
            rows[b, first:last] = 1 + (5 * document) % 7
        if b:
            rows[b, S - S // 4 :] = 0
    return jnp.asarray(rows)


def value_and_gradients(kernel, q, k, v, span, sinks, d_out, soft_cap=None, **blocks):
    """As `golden`."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(q, k, v, sinks):
        def function(*x):
            return kernel(*x[:3], span, scale=SCALE, sinks=x[3], soft_cap=soft_cap, **blocks)

        out, pull = jax.vjp(function, q, k, v, sinks)
        return out, *pull(d_out)

    return run(q, k, v, sinks)


def assert_close(got, want, tolerance):
    """Within `tolerance` of each array's largest entry."""
    for name, a, b in zip(("out", "dq", "dk", "dv", "d_sinks"), got, want, strict=True):
        if a is not None:
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            assert a.shape == b.shape, name
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()), err_msg=name)


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


def collectives(compiled):
    """Every collective of a program, as (kind, type)."""
    kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    return re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", compiled.as_text())


def count(found, kind):
    return sum(name == kind for _, name in found)


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
    with use(mesh, RULES), use_kernel(kernel):
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
        ({"data": 2, "sequence": 2, "tensor": 2}, 12, 4, "reference"),
        ({"data": 2, "sequence": 2, "tensor": 2}, 12, 4, "blockwise"),
        ({"data": 2, "sequence": 2, "tensor": 2}, 8, 2, "blockwise"),
        ({"data": 1, "sequence": 8}, 8, 2, "blockwise"),
        ({"data": 1, "sequence": 8}, 16, 2, "blockwise"),
    ],
)
def test_ulysses(mesh_sizes, H, K, kernel):
    forward, backward = on_mesh(mesh_sizes, H, K, kernel=kernel)
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
    with use(make_mesh(data=2, sequence=2, tensor=2), RULES):
        got = jax.jit(jax.grad(lambda *x: region(*x, segment_ids, d_out).sum(), (0, 1, 2, 3)))(q, k, v, sinks)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_refusals():
    def trace(mesh_sizes, H, K, rules=RULES):
        q, k, v, _, _ = arrays(S=64, H=H, K=K)
        span = spans.causal(segments(2, 64))
        with use(make_mesh(**mesh_sizes), rules) if mesh_sizes else contextlib.nullcontext():
            jax.eval_shape(lambda *x: attention(*x, span, scale=SCALE), q, k, v)

    with pytest.raises(UserError, match=r"6 query heads are not a multiple of 8 = lcm\(2 key/value heads, 8 parts"):
        trace({"data": 1, "sequence": 8}, 6, 2)
    with pytest.raises(UserError, match=r"12 query heads are not a multiple of 24 = lcm\(3 key/value heads, 8 parts"):
        trace({"data": 1, "sequence": 8}, 12, 3)
    with pytest.raises(UserError, match=r"5 query heads are not a multiple of 2 = lcm\(2 key/value heads, 1 parts"):
        trace(None, 5, 2)
    table = {"batch": "data", "length": "sequence", "act_heads": "none", "attention_heads": "none"}
    ring = Rules(parameters=(), activations=lines(**table, attention_length="sequence"))
    with pytest.raises(UserError, match='the table splits them over sequence; write attention_length="none"'):
        trace({"data": 1, "sequence": 8}, 8, 8, ring)
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
