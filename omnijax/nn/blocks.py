"""One device's part of blockwise attention: O(length) memory, and work only where queries see keys.

The forward pass is the online softmax (Milakov & Gimelshein 2018), the backward pass that of FlashAttention-2 (Dao
2023). A row is cut into N blocks of s queries and M blocks of t keys. A block of queries visits the blocks of keys from
its least start to its greatest end, so that packed documents and windows cost what they see, not the row's square.

Shapes: B rows, S queries, T keys, H query heads, K key/value heads, G = H / K query heads share one key/value head.
Inside a block heads lead: q [K, G, s, Dk], k [K, t, Dk], v [K, t, Dv], logits [K, G, s, t].
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


class Options(NamedTuple):
    """What is known when the program is traced. Blocks are clipped to the row and need not divide it."""

    scale: float
    soft_cap: float | None
    query_block: int
    key_block: int
    dtype: Any  # of out and of the gradients: float32 where they are parts of a sum


def forward_rows(
    options: Options,
    q: Float[Array, "B S H Dk"],
    k: Float[Array, "B T K Dk"],
    v: Float[Array, "B T K Dv"],
    start: Int[Array, "B S"],
    end: Int[Array, "B S"],
) -> tuple[Float[Array, "B S H Dv"], Float[Array, "B S H"]]:
    """The attention of q to the keys [start, end), and the logarithm of the softmax's denominator.

    A span may reach beyond the keys at hand. A query that sees none of them gives 0 and -1e30.
    """
    keys, queries = _cut_all(options, (k, v), (q,), (start, end))

    def row(blocks):
        keys, queries = blocks
        return lax.map(functools.partial(_forward_block, options, keys), queries)

    out, log_total = _map_rows(row, keys, queries)
    return _join(out, (*q.shape[:3], v.shape[3])), _join(log_total, q.shape[:3])


def _forward_block(options, keys, queries):
    """One block of queries -> its out [K, G, s, Dv] and log_total [K, G, s]."""
    (q, start, end), (k, v) = queries, keys

    def visit(block, carry):
        weighted, total, maximum = carry
        logits = jnp.where(_seen(start, end, block, k.shape[2]), _logits(options, q, k[block]), -jnp.inf)
        new_maximum = jnp.maximum(maximum, logits.max(-1))
        weights = jnp.exp(logits - new_maximum[..., None])
        shrink = jnp.exp(maximum - new_maximum)
        weighted = weighted * shrink[..., None] + _product("kgst,ktd->kgsd", weights.astype(v.dtype), v[block])
        return weighted, total * shrink + weights.sum(-1), new_maximum

    weighted = jnp.zeros_like(q, jnp.float32, (*q.shape[:-1], v.shape[-1]))
    total = jnp.zeros_like(q, jnp.float32, q.shape[:-1])
    maximum = total - 1e30  # finite, so that a query without keys has weights exp(-inf - maximum) = 0
    weighted, total, maximum = _visit(start, end, k, visit, (weighted, total, maximum))
    total = jnp.where(total > 0, total, 1)
    return (weighted / total[..., None]).astype(options.dtype), maximum + jnp.log(total)


def backward_rows(
    options: Options,
    q: Float[Array, "B S H Dk"],
    k: Float[Array, "B T K Dk"],
    v: Float[Array, "B T K Dv"],
    start: Int[Array, "B S"],
    end: Int[Array, "B S"],
    log_total: Float[Array, "B S H"],
    delta: Float[Array, "B S H"],
    d_out: Float[Array, "B S H Dv"],
) -> tuple[Float[Array, "B S H Dk"], Float[Array, "B T K Dk"], Float[Array, "B T K Dv"]]:
    """Gradients of q, k and v, as far as these keys make them.

    `log_total` and `delta`, the sum of out * d_out less the gradient of log_total, are of the whole softmax.
    """
    keys, queries = _cut_all(options, (k, v), (q, log_total, delta, d_out), (start, end))

    def row(blocks):
        keys, queries = blocks
        zeros = [jnp.zeros_like(x, jnp.float32) for x in keys]
        return lax.scan(functools.partial(_backward_block, options, keys), zeros, queries)

    (dk, dv), dq = _map_rows(row, keys, queries)
    return _join(dq, q.shape), _join(dk, k.shape).astype(options.dtype), _join(dv, v.shape).astype(options.dtype)


def _backward_block(options, keys, d_keys, queries):
    """One block of queries adds to the gradients of all keys and values, and returns its own."""
    (k, v), (q, log_total, delta, d_out, start, end) = keys, queries

    def visit(block, carry):
        dq, dk, dv = carry
        logits = _logits(options, q, k[block])
        seen = _seen(start, end, block, k.shape[2])
        weights = jnp.exp(jnp.where(seen, logits, -jnp.inf) - log_total[..., None])
        d_logits = weights * (_product("kgsd,ktd->kgst", d_out, v[block]) - delta[..., None])
        if options.soft_cap is not None:
            d_logits *= 1 - (logits / options.soft_cap) ** 2  # of tanh
        d_logits = (options.scale * d_logits).astype(q.dtype)
        dq += _product("kgst,ktd->kgsd", d_logits, k[block])
        dk = _add(dk, _product("kgst,kgsd->ktd", d_logits, q), block)
        dv = _add(dv, _product("kgst,kgsd->ktd", weights.astype(d_out.dtype), d_out), block)
        return dq, dk, dv

    dq, dk, dv = _visit(start, end, k, visit, (jnp.zeros_like(q, jnp.float32), *d_keys))
    return [dk, dv], dq.astype(options.dtype)


def _visit(start: Int[Array, "s"], end: Int[Array, "s"], k: Float[Array, "M K t Dk"], visit: Callable, carry: tuple):
    """Fold `carry = visit(block, carry)` over the blocks of keys that some of these queries see.

    The bounds are computed, which also bounds memory. Spans are constants of a scan over layers: out of a loop of
    known length its partial evaluation moves all work on masks, and stacks it to an S x T array.
    """
    blocks, _, size, _ = k.shape
    if blocks == 1:
        return visit(0, carry)
    some = start < end
    first = jnp.where(some, start, blocks * size).min() // size
    last = (jnp.where(some, end, 0).max() - 1) // size
    return lax.fori_loop(first, last + 1, visit, carry)


def _seen(
    start: Int[Array, "s"], end: Int[Array, "s"], block: int | Int[Array, ""], size: int
) -> Bool[Array, "s {size}"]:
    index = block * size + jnp.arange(size)
    return (start[:, None] <= index) & (index < end[:, None])


def _logits(options: Options, q: Float[Array, "K G s Dk"], k: Float[Array, "K t Dk"]) -> Float[Array, "K G s t"]:
    logits = options.scale * _product("kgsd,ktd->kgst", q, k)
    return logits if options.soft_cap is None else options.soft_cap * jnp.tanh(logits / options.soft_cap)


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


def _cut_all(options: Options, keys: tuple, queries: tuple, span: tuple) -> tuple[list, list]:
    """Blocks of k and v, and blocks of whatever queries have, the span last."""
    length, kv_heads = keys[0].shape[1:3]
    group = queries[0].shape[2] // kv_heads
    cut_keys = [_cut(x, options.key_block, kv_heads) for x in keys]
    cut_queries = [_cut(x, options.query_block, kv_heads, group) for x in queries]
    # Clipped, as what pads the last block is no key.
    return cut_keys, cut_queries + [_cut(jnp.clip(bound, 0, length), options.query_block) for bound in span]


def _cut(x: Array, size: int, *heads: int) -> Array:
    """[B, S, H, ...] -> [B, N, *heads, s, ...]: cut tokens into blocks, padded with zeros, and put heads first."""
    size = min(size, x.shape[1])
    blocks = -(-x.shape[1] // size)
    x = jnp.pad(x, ((0, 0), (0, blocks * size - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))
    x = x.reshape(x.shape[0], blocks, size, *heads, *x.shape[3:])
    return jnp.moveaxis(x, 2, 2 + len(heads))


def _join(x: Array, shape: tuple[int, ...]) -> Array:
    """Undo `_cut`: the result has `shape` [B, S, H, ...]."""
    x = jnp.moveaxis(x, 2 + x.ndim - len(shape), 2)
    return x.reshape(shape[0], -1, *shape[2:])[:, : shape[1]]
