"""Attention: one function, one mask.

    span = spans.causal(batch.segment_ids)
    out = attention(q, k, v, span, scale=head_dim**-0.5)

The table in use decides where tokens and heads live, `use_kernel` decides who computes; a model knows neither.
"""

import contextlib
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from omnijax.errors import UserError
from omnijax.nn.blockwise import blockwise, inside_axes, is_ring
from omnijax.nn.gpu import cudnn, tokamax
from omnijax.nn.spans import Span
from omnijax.sharding import constrain, current_rules, split_count


def attention(
    q: Float[Array, "B S H Dk"],
    k: Float[Array, "B T K Dk"],
    v: Float[Array, "B T K Dv"],
    span: Span,
    *,
    scale: float,
    sinks: Float[Array, "H"] | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B S H Dv"]:
    """softmax(scale q k^T) v, where query i sees the keys [start[i], end[i]) and a query that sees none gives 0.

    Query head h reads key/value head h // (H / K). `sinks` adds to each head's softmax one logit without a value;
    `soft_cap` bounds the logits: soft_cap * tanh(logits / soft_cap). The softmax is computed in float32.

    Where the table splits `length`, its layout says how queries and keys meet (`omnijax.sharding.Layout`):

    - Ulysses (Jacobs et al. 2023) exchanges tokens for heads around the kernel: one all-to-all each for q, k, v and
      the output, as every device needs all tokens of its own heads.
    - A ring (`omnijax.nn.ring`) leaves tokens where they are, and hands k and v around.

    Either way each device must own whole key/value heads, so that few of them are repeated. Raises `UserError` where
    the heads do not divide so, and for a kernel that knows no ring.
    """
    if is_ring() and chosen_kernel() != "blockwise":
        raise UserError(
            f"attention: the kernel {chosen_kernel()} needs all keys on one device, which a ring never has; "
            f'choose the kernel blockwise, or Layout(attention="ulysses")'
        )
    rules = current_rules()
    chunks = 1 if rules is None else rules.layout.chunks
    # Whole before any mask is made of them: else what XLA gathers is the mask.
    start, end = (constrain(x, "batch", "attention_length") for x in span)
    k, v = _repeat_heads(q.shape[2], k, v, inside_axes()[2], chunks)
    options = {"scale": scale, "soft_cap": soft_cap}
    queries, keys, values = (_cut(x, chunks, axis=2) for x in (q, k, v))
    sinks_parts = [None] * chunks if sinks is None else _cut(sinks, chunks, axis=0)
    parts = zip(queries, keys, values, sinks_parts, strict=True)
    outs = [_attend(q, k, v, sinks, (start, end), options) for q, k, v, sinks in parts]
    return _join(outs, axis=2)


def _attend(q, k, v, sinks, span, options):
    """Queries, keys and values to where they meet, and the output back."""
    inside, outside = inside_axes(), ("batch", "length", "act_heads", None)
    q, k, v = (constrain(constrain(x, *outside), *inside) for x in (q, k, v))
    out = KERNELS[chosen_kernel()](q, k, v, span, sinks=sinks, **options)
    return constrain(constrain(out, *inside), *outside)


def _cut(x: Array, chunks: int, axis: int) -> list[Array]:
    """Groups of heads; each takes its share of the heads that a device has, so that none moves."""
    if chunks == 1:
        return [x]
    before, heads, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    held = split_count("act_heads", heads)
    parts = jnp.moveaxis(x.reshape(*before, held, chunks, -1, *after), axis + 1, 0)
    return [part.reshape(*before, heads // chunks, *after) for part in parts]


def _join(parts: list[Array], axis: int) -> Array:
    """The inverse of `_cut`."""
    if len(parts) == 1:
        return parts[0]
    before, heads, after = parts[0].shape[:axis], parts[0].shape[axis], parts[0].shape[axis + 1 :]
    held = split_count("act_heads", heads * len(parts))
    split = [part.reshape(*before, held, 1, heads // held, *after) for part in parts]
    return jnp.concatenate(split, axis + 1).reshape(*before, heads * len(parts), *after)


def reference(
    q: Float[Array, "B S H Dk"],
    k: Float[Array, "B T K Dk"],
    v: Float[Array, "B T K Dv"],
    span: Span,
    *,
    scale: float,
    sinks: Float[Array, "H"] | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B S H Dv"]:
    """The definition of `attention` on one device: dense, O(S T) memory, plain autodiff."""
    batch, length, heads, width = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, width)
    logits = scale * jnp.einsum("bskgd,btkd->bskgt", grouped, k, preferred_element_type=jnp.float32)
    logits = logits.reshape(batch, length, heads, -1)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    start, end = (x[:, :, None, None] for x in span)
    index = jnp.arange(k.shape[1])
    logits = jnp.where((start <= index) & (index < end), logits, -jnp.inf)
    # Finite, so that a query without keys has weights exp(-inf - maximum) = 0 and no NaN in its gradient.
    sink = jnp.full(heads, -1e30) if sinks is None else sinks.astype(jnp.float32)
    maximum = jax.lax.stop_gradient(jnp.maximum(logits.max(-1), sink))
    weights = jnp.exp(logits - maximum[..., None])
    total = weights.sum(-1) + (0 if sinks is None else jnp.exp(sink - maximum))
    weights = (weights / jnp.where(total > 0, total, 1)[..., None]).reshape(*grouped.shape[:-1], -1)
    out = jnp.einsum("bskgt,btkd->bskgd", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(batch, length, heads, -1).astype(q.dtype)


KERNELS = {"reference": reference, "blockwise": blockwise, "cudnn": cudnn, "tokamax": tokamax}

# The kernel enters jit's cache key, so two kernels never share a compiled program.
_kernel = jax.make_user_context(default_value="auto")


@contextlib.contextmanager
def use_kernel(name: str) -> Iterator[None]:
    """Inside this context `attention` runs this kernel: "auto" or one of `KERNELS`, else a `UserError`."""
    if name != "auto" and name not in KERNELS:
        raise UserError(f"attention kernel '{name}' does not exist; choose one of auto, {', '.join(KERNELS)}")
    with _kernel(name):
        yield


def chosen_kernel() -> str:
    """The kernel that `attention` runs here."""
    return "blockwise" if _kernel.value == "auto" else _kernel.value


def _repeat_heads(heads: int, k: Array, v: Array, axis: str, chunks: int) -> tuple[Array, Array]:
    """Repeat key/value heads as often as it takes for each part of `axis` to own whole ones in every chunk."""
    kv_heads, parts = k.shape[2], split_count(axis)
    needed = math.lcm(kv_heads, parts * chunks)
    if heads % needed:
        times = f" x {chunks} chunks" if chunks > 1 else ""
        raise UserError(
            f"attention: {heads} query heads are not a multiple of {needed} = lcm({kv_heads} key/value heads, {parts} "
            f"parts of {axis}{times}); change the heads{', the chunks' if chunks > 1 else ''} or the sizes of the mesh "
            f"axes of {axis}"
        )
    if needed == kv_heads:
        return k, v
    return jnp.repeat(k, needed // kv_heads, axis=2), jnp.repeat(v, needed // kv_heads, axis=2)
