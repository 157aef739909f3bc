"""Experts applied to sorted rows, many experts in one product: `omnijax.nn.grouped` for kernels that multiply groups.

Choices are sorted by expert, and about an even share of them is gathered and computed at a time. Where the load is
uneven there are more such chunks: none of the choices is dropped, and no more memory is taken than one chunk needs.
A token gathers what its choices made of it. Nothing is scattered, so sums are in one order, without atomic additions.

Letters: T tokens, k choices of each, X experts, D width, n rows of a chunk.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from omnijax.nn.grouped import Expert, Rows

MARGIN = 128
"""Rows of zeros before and after a chunk: kernels that work in blocks may read, not use, so many beyond a group."""

Product = Callable[[Array, Array, Int[Array, " X"], lax.RaggedDotDimensionNumbers], Array]
"""`product(left, right, sizes, numbers)`: as `jax.lax.ragged_dot_general`, added in float32, in the dtype of `left`.

`numbers` is one of the three below. Rows past the last group, and the product of an empty group, may hold anything.
"""

# Rows [n, D] by kernels [X, D, N]; rows [n, N] by the same, transposed; rows [n, D] by rows [n, N] to [X, D, N].
BY_KERNEL = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
BY_KERNEL_TRANSPOSED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
TO_KERNEL = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def ragged(left: Array, right: Array, sizes: Int[Array, " X"], numbers: lax.RaggedDotDimensionNumbers) -> Array:
    """The `Product` of plain jax; without a kernel of XLA, as on CPUs and in jax 0.10, every row meets every expert."""
    product = lax.ragged_dot_general(left, right, sizes, numbers, preferred_element_type=jnp.float32)
    return product.astype(left.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def chunked(
    product: Product,
    rows: int,
    expert: Expert,
    kernels: Any,
    x: Float[Array, "T D"],
    choice: Int[Array, "T k"],
    weight: Float[Array, "T k"],
) -> Float32[Array, "T D"]:
    """What `omnijax.nn.grouped.grouped` computes, `rows` choices at a time.

    The backward pass computes each chunk again; gradients of kernels are added over chunks in float32.
    """
    return _forward(product, rows, expert, kernels, x, choice, weight)[0]


def _forward(product, rows, expert, kernels, x, choice, weight):
    ordered = _sort(choice, _count(kernels), rows)

    def visit(first, out):
        chunk = _chunk(ordered, first, rows)
        return _add(out, chunk, expert(kernels, *_gather(chunk, x, weight), _rows(product, chunk, choice)))

    out = _for_each_chunk(ordered, rows, visit, jnp.zeros_like(x, jnp.float32))
    return out, (kernels, x, choice, weight)


def _backward(product, rows, expert, saved, d_out):
    kernels, x, choice, weight = saved
    ordered = _sort(choice, _count(kernels), rows)

    def visit(first, carry):
        d_kernels, dx, d_weight = carry
        chunk = _chunk(ordered, first, rows)
        grouped = _rows(product, chunk, choice)
        y, pull = jax.vjp(lambda *primals: expert(*primals, grouped), kernels, *_gather(chunk, x, weight))
        d_y = jnp.where(chunk.real[:, None], d_out[chunk.slots // choice.shape[1]], 0).astype(y.dtype)
        d_chunk, dx_chunk, d_weight_chunk = pull(d_y)
        d_kernels = jax.tree.map(lambda total, part: total + part.astype(jnp.float32), d_kernels, d_chunk)
        d_weight += d_weight_chunk.at[chunk.row].get(mode="fill", fill_value=0)
        return d_kernels, _add(dx, chunk, dx_chunk), d_weight

    zeros = jax.tree.map(lambda a: jnp.zeros_like(a, jnp.float32), (kernels, x))
    d_kernels, dx, d_weight = _for_each_chunk(ordered, rows, visit, (*zeros, jnp.zeros_like(weight)))
    d_kernels = jax.tree.map(lambda d, a: d.astype(a.dtype), d_kernels, kernels)
    return d_kernels, dx.astype(x.dtype), np.zeros(choice.shape, jax.dtypes.float0), d_weight


chunked.defvjp(_forward, _backward)


class _Sorted(NamedTuple):
    """Choices in the order of their experts; number s is the choice s % k of token s // k.

    slots:  the number of the choice at every place, after a margin; zeros behind the last
    place:  the place of every choice
    bounds: the place where the choices of each expert begin, and where those of the last one end
    """

    slots: Int[Array, " places"]
    place: Int[Array, "T k"]
    bounds: Int[Array, " X+1"]


class _Chunk(NamedTuple):
    """Rows of one chunk, margins included.

    slots: the choice that is computed in each row, where it is a real one
    sizes: rows of each expert; the first margin is the first expert's
    row:   the row of every choice; one past the last where it is in another chunk
    """

    slots: Int[Array, " n"]
    real: Bool[Array, " n"]
    sizes: Int[Array, " X"]
    row: Int[Array, "T k"]


def _sort(choice: Array, experts: int, rows: int) -> _Sorted:
    flat = choice.reshape(-1)
    slots = jnp.argsort(flat, stable=True)
    place = jnp.zeros_like(slots).at[slots].set(jnp.arange(slots.size, dtype=slots.dtype), unique_indices=True)
    bounds = (flat[:, None] < jnp.arange(experts + 1)).sum(0, dtype=jnp.int32)
    padded = jnp.pad(slots, (MARGIN, -slots.size % rows + MARGIN))
    return _Sorted(padded, place.reshape(choice.shape), bounds)


def _for_each_chunk(ordered: _Sorted, rows: int, visit: Callable, carry: Any) -> Any:
    """Call `visit(first place, carry)` for as many chunks as hold all choices."""
    if ordered.place.size <= rows:
        return visit(0, carry)
    chunks = -(-ordered.bounds[-1] // rows)
    return lax.fori_loop(0, chunks, lambda number, carry: visit(number * rows, carry), carry)


def _chunk(ordered: _Sorted, first: Any, rows: int) -> _Chunk:
    """The chunk of the choices that stand from place `first` on."""
    n = rows + 2 * MARGIN
    bounds = jnp.clip(ordered.bounds - first, 0, rows)
    index, place = jnp.arange(n) - MARGIN, ordered.place - first
    return _Chunk(
        slots=lax.dynamic_slice_in_dim(ordered.slots, first, n),
        real=(index >= 0) & (index < bounds[-1]),
        sizes=jnp.diff(bounds).at[0].add(MARGIN),
        row=jnp.where((place >= 0) & (place < bounds[-1]), place + MARGIN, n),
    )


def _gather(chunk: _Chunk, x: Array, weight: Array) -> tuple[Array, Array]:
    """The tokens and weights of a chunk's rows, 0 where there is no choice."""
    tokens = jnp.where(chunk.real[:, None], x[chunk.slots // weight.shape[1]], 0)
    return tokens, jnp.where(chunk.real, weight.reshape(-1)[chunk.slots], 0)


def _add(out: Float32[Array, "T D"], chunk: _Chunk, y: Float[Array, "n D"]) -> Float32[Array, "T D"]:
    for row in chunk.row.T:  # one choice of every token after the other: all at once would be k times as large
        out += y.at[row].get(mode="fill", fill_value=0).astype(jnp.float32)
    return out


def _rows(product: Product, chunk: _Chunk, choice: Array) -> Rows:
    owner = choice.reshape(-1)[chunk.slots]

    def pick(vector: Array) -> Array:
        # In float32, as the gradient adds up all rows of an expert.
        return vector.astype(jnp.float32).at[owner].get(mode="clip").astype(vector.dtype)

    return Rows(dot=lambda x, kernel: _dot(product, x, kernel, chunk.sizes), pick=pick)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(product, x, kernel, sizes):
    """Rows [n, D] by the kernels [X, D, *outputs] of their experts; a row without an expert gives 0."""
    return _dot_forward(product, x, kernel, sizes)[0]


def _dot_forward(product, x, kernel, sizes):
    y = _owned(product(x, _flat(kernel), sizes, BY_KERNEL), sizes)
    return y.reshape(len(x), *kernel.shape[2:]), (x, kernel, sizes)


def _dot_backward(product, saved, dy):
    x, kernel, sizes = saved
    dy = dy.reshape(len(x), -1)
    dx = _owned(product(dy, _flat(kernel), sizes, BY_KERNEL_TRANSPOSED), sizes)
    d_kernel = jnp.where(sizes[:, None, None] > 0, product(x, dy, sizes, TO_KERNEL), 0)
    d_kernel = d_kernel.reshape(kernel.shape).astype(kernel.dtype)
    return dx, d_kernel, np.zeros(sizes.shape, jax.dtypes.float0)


_dot.defvjp(_dot_forward, _dot_backward)


def _owned(y: Array, sizes: Array) -> Array:
    return jnp.where(jnp.arange(len(y))[:, None] < sizes.sum(), y, 0)


def _flat(kernel: Array) -> Array:
    return kernel.reshape(*kernel.shape[:2], -1)


def _count(kernels: Any) -> int:
    return jax.tree.leaves(kernels)[0].shape[0]
