"""The GPU kernels: what a machine without a GPU can say of them, and (marked gpu) what only one with a GPU can."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused

from omnijax import report
from omnijax.config import Compute
from omnijax.errors import UserError
from omnijax.mesh import make_mesh
from omnijax.nn import gpu, spans
from omnijax.nn.attention import reference
from omnijax.sharding import Rules, lines, use
from omnijax.xla_flags import COMBINE_FLAGS, gpu_flags

SCALE = 0.3
HAS_TOKAMAX = importlib.util.find_spec("tokamax") is not None
needs_tokamax = pytest.mark.skipif(not HAS_TOKAMAX, reason="tokamax is not installed: pip install 'omnijax[tokamax]'")
# Not ours to mend: tokamax 0.0.12 takes `dot` from where jax 0.10 no longer keeps it.
pytestmark = pytest.mark.filterwarnings("ignore:jax.experimental.pallas.dot:DeprecationWarning")
# Documents of several lengths, padding at either end, in between, and nowhere; ids need not rise.
SEGMENTS = np.array(
    [
        [1] * 20 + [2] * 30 + [0] * 14,
        [0] * 3 + [7] + [2] * 30 + [0] * 10 + [1] * 20,
        [5] * 64,
        [0] * 64,
    ],
    np.int32,
)
SPANS = {
    "causal": lambda segments: spans.causal(jnp.asarray(segments)),
    "document": lambda segments: spans.document(jnp.asarray(segments)),
    "window": lambda segments: spans.window(spans.causal(jnp.asarray(segments)), 5),
}
EXPRESSIBLE = {"causal": (True, False), "document": (False, True), "window": (False, False)}


def arrays(B=4, S=64, H=4, K=2, D=32, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (B, S, H, D), (B, S, K, D), (B, S, K, D), (B, S, H, D)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def outputs(kernel, span, q, k, v, d_out, **options):
    """The output and the gradients of q, k and v."""

    @jax.jit
    def run(span, q, k, v, d_out):
        out, pullback = jax.vjp(lambda q, k, v: kernel(q, k, v, span, scale=SCALE, **options), q, k, v)
        return out, *pullback(d_out)

    return run(span, q, k, v, d_out)


def assert_same(actual, expected, tolerance):
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(*(np.asarray(z, np.float32) for z in (x, y)), rtol=tolerance, atol=tolerance)


def assert_near(actual, expected):
    """Within two percent of the largest element: bfloat16 against float32."""
    for x, y in zip(actual, expected, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.abs(x - y).max() <= 0.02 * np.abs(y).max()


def packed_by_the_book(q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type):
    """What jax documents of cuDNN's packed layout, densely: run m of a row starts at offset m and is so long."""
    assert q.shape == k.shape
    assert kv_seqlen is q_seqlen
    assert kv_offsets is q_offsets
    index = jnp.arange(q.shape[1])[None, :, None]
    begin, size = q_offsets[:, None, :-1], q_seqlen[:, None]
    inside = (begin >= 0) & (begin <= index) & (index < begin + size)  # [B, S, M]
    same = jnp.einsum("bqm,bkm->bqk", inside.astype(jnp.float32), inside.astype(jnp.float32)) > 0
    if mask_type is fused.MaskType.PADDING_CAUSAL:
        same &= jnp.tril(jnp.ones(same.shape[1:], bool))
    logits = scale * jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    # No run: NaN, as a token that cuDNN does not write may hold anything.
    weights = jax.nn.softmax(jnp.where(same[:, None], logits, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v.astype(jnp.float32)).astype(q.dtype)


@pytest.fixture
def as_on_hopper(monkeypatch):
    """Answers the two questions that jax puts to the machine before it traces a call of cuDNN."""
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)


@pytest.mark.parametrize("max_documents", [6, 3])
@pytest.mark.parametrize("name", SPANS)
def test_cudnn_is_given_what_the_span_says(name, max_documents) -> None:
    span = SPANS[name](SEGMENTS)
    *_, is_causal, is_whole = gpu._documents(*span, max_documents)
    fits = max_documents == 6  # the second row has five runs
    assert (bool(is_causal), bool(is_whole)) == (EXPRESSIBLE[name] if fits else (False, False))
    module = types.SimpleNamespace(dot_product_attention=packed_by_the_book, MaskType=fused.MaskType)

    def kernel(q, k, v, span, scale):
        return gpu._cudnn_rows(module, scale, max_documents, q, k, v, *span)

    q, k, v, d_out = arrays(dtype=jnp.float32)
    assert_same(outputs(kernel, span, q, k, v, d_out), outputs(reference, span, q, k, v, d_out), 2e-5)


def test_a_span_that_only_looks_like_documents_is_not_given_to_cudnn() -> None:
    start, end = (np.array(x) for x in SPANS["causal"](SEGMENTS))
    for row, query, bound, value in [(0, 25, start, 19), (0, 25, end, 25), (1, 0, end, 1), (2, 63, start, 1)]:
        before = bound[row, query]
        bound[row, query] = value
        *_, is_causal, is_whole = gpu._documents(jnp.asarray(start), jnp.asarray(end), 8)
        # A padding query that sees itself is one more causal document; all others are no documents at all.
        assert (bool(is_causal), bool(is_whole)) == ((row, query) == (1, 0), False)
        bound[row, query] = before


def test_cudnn_lowers_to_its_calls_forward_and_backward(as_on_hopper) -> None:
    text = lowered(functools.partial(outputs, gpu.cudnn))
    calls = re.findall(r"@__cudnn\$(\w+)", text)
    assert calls == ["fmhaSoftmax"] * 2 + ["fmhaSoftmaxBackward"] * 2
    masks = re.findall(r"mask_type\W+22: \W+22(\w+)\\22", text)
    assert masks == ["PADDING_CAUSAL", "PADDING"] * 2
    assert set(re.findall(r"max_seg_per_batch\W+22: (\d+)", text)) == {"64"}
    assert "4x4x64x64xf32" not in text  # no dense mask or logits


def test_on_a_mesh_each_device_chooses_for_its_own_rows(as_on_hopper, monkeypatch) -> None:
    activations = lines(
        batch="replica data expert",
        length="sequence",
        act_heads="tensor",
        attention_length="none",
        attention_heads="tensor sequence",
    )
    names = ["causal", "document", "window", "causal"]  # of the four rows, one on each part of `data`
    bounds = zip(*(SPANS[name](SEGMENTS[i : i + 1]) for i, name in enumerate(names)), strict=True)
    span = tuple(jnp.concatenate(rows) for rows in bounds)
    tensors = arrays()
    expected = outputs(reference, span, *tensors)
    with use(make_mesh(data=4, tensor=2), Rules(parameters=(), activations=activations)):
        text = lowered(functools.partial(outputs, gpu.cudnn))
        operands = re.findall(r"@__cudnn\$fmhaSoftmax\(.*?: \(tensor<([\dx]+)xbf16>", text)
        assert operands == ["1x64x2x32"] * 2
        monkeypatch.setattr(fused, "dot_product_attention", packed_by_the_book)
        actual = outputs(gpu.cudnn, span, *tensors)
    assert_same(actual, expected, 4e-2)


def test_a_run_says_what_cudnn_leaves_to_blockwise() -> None:
    said = report.compute_text(Compute(), "cudnn", None)
    assert "attention kernel cudnn (blockwise for windows, and where a row has over 64 documents and gaps);" in said
    assert "attention kernel blockwise;" in report.compute_text(Compute(), "blockwise", None)


def lowered(run) -> str:
    def step(segments, *tensors):
        return run(spans.causal(segments), *tensors)

    return jax.jit(step).trace(SEGMENTS, *arrays()).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("kernel", [gpu.cudnn, gpu.tokamax])
def test_kernels_refuse_what_they_cannot_express(kernel, as_on_hopper) -> None:
    q, k, v, _ = arrays()
    span = SPANS["causal"](SEGMENTS)
    short = tuple(bound[:, :32] for bound in span)
    refused = [
        ("takes q, k, v all in bfloat16", (q.astype(jnp.float32), k, v, span), {}),
        ("cannot express sinks", (q, k, v, span), {"sinks": jnp.zeros(4)}),
    ]
    if kernel is gpu.cudnn:
        refused += [
            ("cannot express a soft cap", (q, k, v, span), {"soft_cap": 5.0}),
            ("cannot express cross attention (32 queries, 64 keys)", (q[:, :32], k, v, short), {}),
            ("cannot express values of width 16", (q, k, v[..., :16], span), {}),
            ("cannot express heads of width 12", (q[..., :12], k[..., :12], v[..., :12], span), {}),
            ("cannot express max_documents=1", (q, k, v, span), {"max_documents": 1}),
        ]
    for message, arguments, options in refused:
        with pytest.raises(UserError, match=re.escape(message)) as caught:
            kernel(*arguments, scale=SCALE, **options)
        assert "use the kernel blockwise" in str(caught.value)


def test_cudnn_refuses_machines_that_lack_it(monkeypatch) -> None:
    q, k, v, _ = arrays()
    if jax.default_backend() != "gpu":
        with pytest.raises(UserError, match="finds no cuDNN here"):
            gpu.cudnn(q, k, v, SPANS["causal"](SEGMENTS), scale=SCALE)
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: False)
    with pytest.raises(UserError, match="needs a Hopper GPU or newer"):
        gpu.cudnn(q, k, v, SPANS["causal"](SEGMENTS), scale=SCALE)


@pytest.mark.skipif(HAS_TOKAMAX, reason="tokamax is installed")
def test_tokamax_says_how_to_install_it() -> None:
    q, k, v, _ = arrays()
    with pytest.raises(UserError, match=re.escape("pip install 'omnijax[tokamax]'")):
        gpu.tokamax(q, k, v, SPANS["causal"](SEGMENTS), scale=SCALE)


@needs_tokamax
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("name", SPANS)
def test_tokamax_reads_the_span_as_we_do(name, soft_cap) -> None:
    """tokamax's plain XLA operation, which takes the same mask object as its kernels, agrees with `reference`."""
    implementations, mask_class = gpu._tokamax_parts()

    def kernel(q, k, v, span, scale, soft_cap):
        return gpu._tokamax_rows([implementations["xla"]], mask_class, scale, soft_cap, q, k, v, *span)

    span, tensors = SPANS[name](SEGMENTS), arrays(dtype=jnp.float32)
    expected = outputs(reference, span, *tensors, soft_cap=soft_cap)
    assert_same(outputs(kernel, span, *tensors, soft_cap=soft_cap), expected, 2e-5)


@needs_tokamax
def test_tokamax_lowers_to_its_triton_kernels_forward_and_backward() -> None:
    from tokamax._src import config

    implementations, mask_class = gpu._tokamax_parts()

    def kernel(q, k, v, span, scale):
        return gpu._tokamax_rows([implementations["triton"]], mask_class, scale, None, q, k, v, *span)

    with config.cross_compile(True):
        text = lowered(functools.partial(outputs, kernel))
    assert re.findall(r'name = "(pallas_\w+)"', text) == [
        "pallas_flash_attention_fwd_res",
        "pallas_flash_attention_vjp",
    ]
    assert "4x4x64x64xf32" not in text


@needs_tokamax
def test_tokamax_refuses_rather_than_make_a_dense_mask() -> None:
    q, k, v, _ = arrays()
    if jax.default_backend() != "gpu":
        with pytest.raises(UserError, match="no kernel of tokamax takes these arguments here"):
            gpu.tokamax(q, k, v, SPANS["causal"](SEGMENTS), scale=SCALE)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU here")
@pytest.mark.parametrize("name", SPANS)
@pytest.mark.parametrize("kernel", [gpu.cudnn, pytest.param(gpu.tokamax, marks=needs_tokamax)])
def test_kernels_agree_with_reference_on_a_gpu(kernel, name) -> None:
    segments = np.repeat(SEGMENTS, 8, axis=1)
    span, tensors = SPANS[name](segments), arrays(S=512, H=8, K=2, D=64)
    expected = outputs(reference, span, *(x.astype(jnp.float32) for x in tensors))
    assert_near(outputs(kernel, span, *tensors), expected)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU here")
@pytest.mark.parametrize("kernel", [gpu.cudnn, pytest.param(gpu.tokamax, marks=needs_tokamax)])
def test_documents_do_not_see_each_other_on_a_gpu(kernel) -> None:
    segments = np.repeat(SEGMENTS, 8, axis=1)
    q, k, v, d_out = arrays(S=512, H=8, K=2, D=64)
    outside = jnp.asarray(segments != 2)[:, :, None, None]
    before = outputs(kernel, SPANS["causal"](segments), q, k, v, d_out)
    after = outputs(kernel, SPANS["causal"](segments), q, *(jnp.where(outside, x + 1, x) for x in (k, v)), d_out)
    before, after = ([np.asarray(x, np.float32)[segments == 2] for x in values] for values in (before, after))
    np.testing.assert_array_equal(before[0], after[0])
    assert_near(after, before)  # gradients may be summed in another order each time


def start_jax(flags: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.numpy.zeros(1)"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_xla_knows_the_flags_and_would_refuse_another() -> None:
    flags = gpu_flags(layer_bytes=1 << 28)
    assert all(f"--{flag}=268435456" in flags.split() for flag in COMBINE_FLAGS)
    assert not any(flag in gpu_flags() for flag in COMBINE_FLAGS)
    done = start_jax(flags)
    assert done.returncode == 0, done.stderr
    assert start_jax(flags + " --xla_gpu_no_such_flag=true").returncode != 0
