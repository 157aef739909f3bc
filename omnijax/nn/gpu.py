"""Attention kernels that exist only on GPUs. Every private entry point of jax and tokamax they use is in this file.

`cudnn` (fused in NVIDIA's library) knows packed documents, `tokamax` (Pallas) any span. Both compute what
`omnijax.nn.attention.reference` defines, and refuse with a `UserError` what they cannot express.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from omnijax.errors import UserError
from omnijax.nn.blockwise import blockwise, inside_axes
from omnijax.nn.spans import Span
from omnijax.sharding import activation_spec

_MEND = "use the kernel blockwise"
MAX_DOCUMENTS = 64
"""How many documents, and gaps between them, a row may have for cuDNN to compute it."""


def cudnn(
    q: Float[Array, "B S H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K Dv"],
    span: Span,
    *,
    scale: float,
    sinks: Float[Array, "H"] | None = None,
    soft_cap: float | None = None,
    max_documents: int = MAX_DOCUMENTS,
) -> Float[Array, "B S H Dv"]:
    """`omnijax.nn.attention.reference` by cuDNN's packed layout, which needs Hopper or newer and cuDNN 9.6 or newer.

    cuDNN knows documents by their offsets, and in each either causal attention (`spans.causal`) or whole documents
    (`spans.document`). Spans are known only when the program runs, so the choice is made there, on each device: where
    all its rows are of one of these forms and hold at most `max_documents` runs (padding counts as a run), cuDNN
    computes them, else `blockwise` does. A window or a long row of tiny documents is thus slower, never wrong.

    Keys and values are repeated for each query head, and the softmax statistics take
    4 * B * max_documents * H * S bytes until a layer's backward pass is done.

    Raises `UserError` for sinks, a soft cap, cross attention, Dv != D, D above 256 or no multiple of 8, float32, and
    where there is no such GPU or cuDNN.
    """
    _refuse_dtype("cudnn", q, k, v)
    width = q.shape[3]
    refused = {
        "a soft cap": soft_cap is not None,
        "sinks": sinks is not None,
        f"cross attention ({q.shape[1]} queries, {k.shape[1]} keys)": q.shape[1] != k.shape[1],
        f"values of width {v.shape[3]} next to keys of width {width}": v.shape[3] != width,
        f"heads of width {width} (it knows multiples of 8 up to 256)": width % 8 != 0 or width > 256,
        f"max_documents={max_documents} (it is at least 2)": max_documents < 2,
    }
    for what, is_so in refused.items():
        if is_so:
            raise UserError(f"attention: the kernel cudnn cannot express {what}; {_MEND}")
    fused = _fused_attention()
    return _per_device("cudnn", functools.partial(_cudnn_rows, fused, scale, max_documents), q, k, v, span)


def tokamax(
    q: Float[Array, "B S H Dk"],
    k: Float[Array, "B T K Dk"],
    v: Float[Array, "B T K Dv"],
    span: Span,
    *,
    scale: float,
    sinks: Float[Array, "H"] | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B S H Dv"]:
    """`omnijax.nn.attention.reference` by tokamax: its Mosaic kernel (Hopper, Blackwell), else its Triton kernel.

    Any span, soft cap and grouping of heads. Raises `UserError` for sinks and float32, where tokamax is not installed,
    and where neither kernel takes these arguments on this device: tokamax's own next choice is a dense mask, which
    needs O(S T) memory, so it is not taken.
    """
    _refuse_dtype("tokamax", q, k, v)
    if sinks is not None:
        raise UserError(f"attention: the kernel tokamax cannot express sinks; {_MEND}")
    implementations, mask_class = _tokamax_parts()
    kernels = [implementations[name] for name in ("mosaic_gpu", "triton") if name in implementations]
    return _per_device("tokamax", functools.partial(_tokamax_rows, kernels, mask_class, scale, soft_cap), q, k, v, span)


def _refuse_dtype(kernel: str, *arrays: Array) -> None:
    dtypes = {x.dtype for x in arrays}
    if dtypes not in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)}):
        raise UserError(
            f"attention: the kernel {kernel} takes q, k, v all in bfloat16 or all in float16, not "
            f"{', '.join(sorted(map(str, dtypes)))}; {_MEND}"
        )


def _per_device(name: str, kernel: Callable[..., Array], q: Array, k: Array, v: Array, span: Span) -> Array:
    """`kernel(q, k, v, start, end)` on the rows and heads that each device holds."""
    spec, mesh = activation_spec(q.shape, *inside_axes()), jax.sharding.get_abstract_mesh()
    if spec is None or mesh.size == 1:
        return kernel(q, k, v, *span)
    if spec[1] is not None:
        raise UserError(
            f"attention: the kernel {name} needs all tokens of a head on one device, but the table splits them over "
            f'{spec[1]}; write attention_length="none", or {_MEND} with Layout(attention="ring")'
        )
    rows = PartitionSpec(spec[0])
    return jax.shard_map(
        kernel,
        in_specs=(spec, spec, spec, rows, rows),
        out_specs=spec,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,  # neither library says over which axes its results differ
    )(q, k, v, *span)


def _fused_attention() -> Any:
    """jax's module of cuDNN attention, once it is sure to run here."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as fused

        version = fused.check_cudnn_version()
        is_hopper = fused.check_compute_capability("9.0")
    except (ImportError, AttributeError, RuntimeError) as error:
        raise UserError(f"attention: the kernel cudnn finds no cuDNN here ({error}); {_MEND}") from error
    if version < 90600 or not is_hopper:
        raise UserError(
            f"attention: the kernel cudnn needs a Hopper GPU or newer and cuDNN 9.6 (90600) or newer for packed "
            f"documents; here cuDNN is {version} and the device {jax.devices()[0].device_kind}; {_MEND}"
        )
    return fused


def _cudnn_rows(
    fused: Any, scale: float, max_documents: int, q: Array, k: Array, v: Array, start: Array, end: Array
) -> Array:
    offsets, lengths, is_causal, is_whole = _documents(start, end, max_documents)
    seen = (end > start)[:, :, None, None]

    def packed(mask_type, q, k, v):
        # jax 0.10.2 computes the offsets of keys with the number of query heads: wrong for grouped heads, no error.
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        out = fused.dot_product_attention(
            q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets, kv_offsets=offsets,
            scale=scale, mask_type=mask_type,
        )  # fmt: skip
        return jnp.where(seen, out, 0)

    def other(q, k, v):
        return blockwise(q, k, v, (start, end), scale=scale)

    causal = functools.partial(packed, fused.MaskType.PADDING_CAUSAL)
    whole = functools.partial(packed, fused.MaskType.PADDING)
    return lax.switch(jnp.where(is_causal, 1, jnp.where(is_whole, 2, 0)), (other, causal, whole), q, k, v)


def _documents(start: Array, end: Array, most: int) -> tuple[Array, Array, Array, Array]:
    """Where the runs of these rows stand, and whether they say all that the spans [B, S] say.

    A run is a document or the padding between two, so that each token is in one and cuDNN writes all of its results.
    Returns offsets [B, most + 1] and lengths [B, most] as cuDNN wants them (-1: no such run), and two truths for all
    rows together: these are the spans of causal documents; these are the spans of whole documents.
    """
    length = start.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)
    seen = end > start
    after_seen = jnp.pad(seen[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    opens = jnp.where(seen, start == index, after_seen) | (index == 0)
    run_start = lax.cummax(jnp.where(opens, index, 0), axis=1)
    closes = jnp.pad(opens[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    run_end = lax.cummin(jnp.where(closes, index + 1, length), axis=1, reverse=True)

    edges = jax.vmap(lambda row: jnp.nonzero(row, size=most, fill_value=length)[0])(opens).astype(jnp.int32)
    edges = jnp.pad(edges, ((0, 0), (0, 1)), constant_values=length)
    is_run = edges < length
    lengths = jnp.where(is_run[:, :-1], edges[:, 1:] - edges[:, :-1], -1)

    fits = opens.sum(1).max() <= most
    starts_agree = fits & jnp.all(~seen | (start == run_start))
    is_causal = starts_agree & jnp.all(~seen | (end == index + 1))
    is_whole = starts_agree & jnp.all(~seen | (end == run_end))
    return jnp.where(is_run, edges, -1), lengths, is_causal, is_whole


def _tokamax_parts() -> tuple[Mapping[str, Any], Any]:
    """tokamax's attention operations by name, and the class of its masks."""
    try:
        from absl import flags
        from tokamax._src.ops.attention.api import IMPLEMENTATIONS
        from tokamax._src.ops.attention.base import Mask
    except ImportError as error:
        raise UserError(
            f"attention: the kernel tokamax cannot be imported ({error}); "
            f"run pip install 'omnijax[tokamax]', or {_MEND}"
        ) from error
    # Else tokamax reads the program's command line for flags of its own, and fails at ours.
    flags.FLAGS.mark_as_parsed()
    return IMPLEMENTATIONS, Mask


def _tokamax_rows(
    kernels: list[Any], mask_class: Any, scale: float, soft_cap: float | None, q: Array, k: Array, v: Array,
    start: Array, end: Array,
) -> Array:  # fmt: skip
    # A query without keys looks at one key and its output is dropped: no division by zero, forward or backward.
    seen = end > start
    own = jnp.minimum(jnp.arange(q.shape[1], dtype=jnp.int32), k.shape[1] - 1)
    start, end = jnp.where(seen, start, own), jnp.where(seen, end, own + 1)
    mask, reasons = mask_class(k_start=start[:, None], k_end=end[:, None]), []
    for kernel in kernels:
        try:
            out = kernel(q, k, v, mask=mask, logits_scale=scale, logits_soft_cap=soft_cap)
        except NotImplementedError as error:
            reasons.append(f"{type(kernel).__name__}: {error}")
        else:
            return jnp.where(seen[:, :, None, None], out, 0)
    raise UserError(f"attention: no kernel of tokamax takes these arguments here ({'; '.join(reasons)}); {_MEND}")
