"""Blockwise attention in plain JAX: O(length) memory, and work only where queries see keys.

The forward pass is the online softmax (Milakov & Gimelshein 2018), the backward pass that of FlashAttention-2 (Dao
2023). A row is cut into N blocks of s queries and M blocks of t keys. A block of queries visits the blocks of keys from
its least start to its greatest end, so that packed documents and windows cost what they see, not the row's square.

Shapes: B rows, S queries, T keys, H query heads, K key/value heads, G = H / K query heads share one key/value head.
Inside a block heads lead: q [K, G, s, Dk], k [K, t, Dk], v [K, t, Dv], logits [K, G, s, t].
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from omnijax.errors import UserError
from omnijax.nn.spans import Span
from omnijax.sharding import activation_spec


class _Static(NamedTuple):
    """What is known when the program is traced."""

    scale: float
    soft_cap: float | None
    query_block: int
    key_block: int
    spec: PartitionSpec | None  # of q, k, v and the output; None: all on one device


def blockwise(
    q: Float[Array, "B S H Dk"],
    k: Float[Array, "B T K Dk"],
    v: Float[Array, "B T K Dv"],
    span: Span,
    *,
    scale: float,
    sinks: Float[Array, "H"] | None = None,
    soft_cap: float | None = None,
    query_block: int = 256,
    key_block: int = 256,
) -> Float[Array, "B S H Dv"]:
    """`omnijax.nn.attention.reference`, block by block. Blocks are clipped to the row and need not divide it.

    Where a table is in use, every device computes its own rows and heads. Raises `UserError` where the table splits
    the tokens inside attention.
    """
    spec = activation_spec(q.shape, "batch", "attention_length", "attention_heads", None)
    if spec is not None and spec[1] is not None:
        raise UserError(
            f"attention: the blockwise kernel needs all tokens of a head on one device, but the table splits them "
            f'over {spec[1]}; write attention_length="none"'
        )
    if jax.sharding.get_abstract_mesh().size == 1:
        spec = None
    start, end = (jnp.clip(bound, 0, k.shape[1]) for bound in span)  # what pads the last block is no key
    static = _Static(scale, soft_cap, min(query_block, q.shape[1]), min(key_block, k.shape[1]), spec)
    out, log_total = _attention(static, q, k, v, start, end)
    if sinks is None:
        return out
    # A sink has no value: all it does is take exp(sink) / (total + exp(sink)) away from the other keys.
    return (out * jax.nn.sigmoid(log_total - sinks)[..., None]).astype(q.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static, q, k, v, start, end):
    """Returns out [B, S, H, Dv] and log_total [B, S, H], the logarithm of the softmax's denominator."""
    return _forward(static, q, k, v, start, end)[0]


def _forward(static, q, k, v, start, end):
    out, log_total = _per_device(_forward_rows, static, (q, k, v, start, end), out_ranks=(4, 3))
    return (out, log_total), (q, k, v, start, end, out, log_total)


def _backward(static, saved, gradients):
    q, k, v, start, end, out, log_total = saved
    d_out, d_log_total = gradients
    delta = jnp.einsum("bshd,bshd->bsh", out, d_out, preferred_element_type=jnp.float32) - d_log_total
    arguments = (q, k, v, start, end, log_total, delta, d_out)
    dq, dk, dv = _per_device(_backward_rows, static, arguments, out_ranks=(4, 4, 4))
    no_gradient = np.zeros(start.shape, jax.dtypes.float0)
    return dq, dk, dv, no_gradient, no_gradient


_attention.defvjp(_forward, _backward)


def _per_device(function: Callable, static: _Static, arguments: tuple, out_ranks: tuple[int, ...]) -> tuple:
    """`function(static, *arguments)` on each device's own rows and heads; an array's rank tells which axes it has."""
    function = functools.partial(function, static)
    if static.spec is None:
        return function(*arguments)
    rows, _, heads, _ = static.spec
    specs = {4: static.spec, 3: PartitionSpec(rows, None, heads), 2: PartitionSpec(rows)}
    mesh = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        function,
        in_specs=jax.tree.map(lambda x: specs[x.ndim], arguments),
        out_specs=tuple(specs[rank] for rank in out_ranks),
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
    )(*arguments)


def _forward_rows(static, q, k, v, start, end):
    """`_attention` on one device."""
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    keys = [_cut(x, static.key_block, kv_heads) for x in (k, v)]
    queries = [_cut(q, static.query_block, kv_heads, group), *(_cut(x, static.query_block) for x in (start, end))]

    def row(blocks):
        keys, queries = blocks
        return lax.map(functools.partial(_forward_block, static, keys), queries)

    out, log_total = _map_rows(row, keys, queries)
    return _join(out, (*q.shape[:3], v.shape[3])), _join(log_total, q.shape[:3])


def _forward_block(static, keys, queries):
    """One block of queries -> its out [K, G, s, Dv] and log_total [K, G, s]."""
    (q, start, end), (k, v) = queries, keys

    def visit(block, carry):
        weighted, total, maximum = carry
        logits = jnp.where(_seen(static, start, end, block), _logits(static, q, k[block]), -jnp.inf)
        new_maximum = jnp.maximum(maximum, logits.max(-1))
        weights = jnp.exp(logits - new_maximum[..., None])
        shrink = jnp.exp(maximum - new_maximum)
        weighted = weighted * shrink[..., None] + _product("kgst,ktd->kgsd", weights.astype(v.dtype), v[block])
        return weighted, total * shrink + weights.sum(-1), new_maximum

    weighted = jnp.zeros_like(q, jnp.float32, (*q.shape[:-1], v.shape[-1]))
    total = jnp.zeros_like(q, jnp.float32, q.shape[:-1])
    maximum = total - 1e30  # finite, so that a query without keys has weights exp(-inf - maximum) = 0
    weighted, total, maximum = _visit(static, start, end, k.shape[0], visit, (weighted, total, maximum))
    total = jnp.where(total > 0, total, 1)
    return (weighted / total[..., None]).astype(q.dtype), maximum + jnp.log(total)


def _backward_rows(static, q, k, v, start, end, log_total, delta, d_out):
    """Returns dq, dk, dv in the shapes and dtypes of q, k, v."""
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    keys = [_cut(x, static.key_block, kv_heads) for x in (k, v)]
    queries = [_cut(x, static.query_block, kv_heads, group) for x in (q, log_total, delta, d_out)]
    queries += [_cut(x, static.query_block) for x in (start, end)]

    def row(blocks):
        keys, queries = blocks
        zeros = [jnp.zeros_like(x, jnp.float32) for x in keys]
        return lax.scan(functools.partial(_backward_block, static, keys), zeros, queries)

    (dk, dv), dq = _map_rows(row, keys, queries)
    return _join(dq, q.shape), _join(dk, k.shape).astype(k.dtype), _join(dv, v.shape).astype(v.dtype)


def _backward_block(static, keys, d_keys, queries):
    """One block of queries adds to the gradients of all keys and values, and returns its own."""
    (k, v), (q, log_total, delta, d_out, start, end) = keys, queries

    def visit(block, carry):
        dq, dk, dv = carry
        logits = _logits(static, q, k[block])
        seen = _seen(static, start, end, block)
        weights = jnp.exp(jnp.where(seen, logits, -jnp.inf) - log_total[..., None])
        d_logits = weights * (_product("kgsd,ktd->kgst", d_out, v[block]) - delta[..., None])
        if static.soft_cap is not None:
            d_logits *= 1 - (logits / static.soft_cap) ** 2  # of tanh
        d_logits = (static.scale * d_logits).astype(q.dtype)
        dq += _product("kgst,ktd->kgsd", d_logits, k[block])
        dk = _add(dk, _product("kgst,kgsd->ktd", d_logits, q), block)
        dv = _add(dv, _product("kgst,kgsd->ktd", weights.astype(d_out.dtype), d_out), block)
        return dq, dk, dv

    dq, dk, dv = _visit(static, start, end, k.shape[0], visit, (jnp.zeros_like(q, jnp.float32), *d_keys))
    return [dk, dv], dq.astype(q.dtype)


def _visit(static: _Static, start: Int[Array, "s"], end: Int[Array, "s"], blocks: int, visit: Callable, carry: tuple):
    """Fold `carry = visit(block, carry)` over the blocks of keys that some of these queries see.

    The bounds are computed, which also bounds memory. Spans are constants of a scan over layers: out of a loop of
    known length its partial evaluation moves all work on masks, and stacks it to an S x T array.
    """
    if blocks == 1:
        return visit(0, carry)
    some = start < end
    first = jnp.where(some, start, blocks * static.key_block).min() // static.key_block
    last = (jnp.where(some, end, 0).max() - 1) // static.key_block
    return lax.fori_loop(first, last + 1, visit, carry)


def _seen(
    static: _Static, start: Int[Array, "s"], end: Int[Array, "s"], block: int | Int[Array, ""]
) -> Bool[Array, "s t"]:
    index = block * static.key_block + jnp.arange(static.key_block)
    return (start[:, None] <= index) & (index < end[:, None])


def _logits(static: _Static, q: Float[Array, "K G s Dk"], k: Float[Array, "K t Dk"]) -> Float[Array, "K G s t"]:
    logits = static.scale * _product("kgsd,ktd->kgst", q, k)
    return logits if static.soft_cap is None else static.soft_cap * jnp.tanh(logits / static.soft_cap)


def _product(equation: str, x: Array, y: Array) -> Array:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _add(
    total: Float[Array, "M K t D"], part: Float[Array, "K t D"], block: int | Int[Array, ""]
) -> Float[Array, "M K t D"]:
    return lax.dynamic_update_index_in_dim(total, total[block] + part, block, 0)


def _map_rows(row: Callable, keys: list, queries: list) -> tuple:
    """Rows of one block go through `row` together; longer rows one by one, each with the blocks it visits."""
    one_block = keys[0].shape[1] == queries[0].shape[1] == 1
    return jax.vmap(row)((keys, queries)) if one_block else lax.map(row, (keys, queries))


def _cut(x: Array, size: int, *heads: int) -> Array:
    """[B, S, H, ...] -> [B, N, *heads, s, ...]: cut tokens into blocks, padded with zeros, and put heads first."""
    blocks = -(-x.shape[1] // size)
    x = jnp.pad(x, ((0, 0), (0, blocks * size - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))
    x = x.reshape(x.shape[0], blocks, size, *heads, *x.shape[3:])
    return jnp.moveaxis(x, 2, 2 + len(heads))


def _join(x: Array, shape: tuple[int, ...]) -> Array:
    """Undo `_cut`: the result has `shape` [B, S, H, ...]."""
    x = jnp.moveaxis(x, 2 + x.ndim - len(shape), 2)
    return x.reshape(shape[0], -1, *shape[2:])[:, : shape[1]]
