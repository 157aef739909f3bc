"""Experts applied to the tokens that chose them, exactly: no token is dropped, and none is computed for nothing.

Choices are sorted by expert. An expert takes its tokens in blocks, large ones first and what is left in smaller ones,
so that both the matrix products and the padding stay small work; a block is gathered, computed and added to its tokens
before the next one begins. Nothing as large as all choices is ever stored, however uneven they are.

Letters: T tokens, k choices of each, X experts, D width, n rows of a block.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int

BLOCKS = (256, 64, 16)


class Rows(NamedTuple):
    """How rows meet the arrays of their expert; an `Expert` written with these two serves every way to group rows.

    dot:  rows [n, D] by a kernel [D, *outputs], giving [n, *outputs]
    pick: a vector of an expert, such as a bias, as something to add to rows
    """

    dot: Callable[[Array, Array], Array]
    pick: Callable[[Array], Array]


Expert = Callable[[Any, Float[Array, "n D"], Float[Array, " n"], Rows], Float[Array, "n D"]]
"""`expert(kernels, x, weight, rows)`: what an expert makes of its rows, each times its weight.

It gives a kernel to `rows.dot`, and to nothing else: the kernel may be one with an adapter.
"""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped(
    expert: Expert, kernels: Any, x: Float[Array, "T D"], choice: Int[Array, "T k"], weight: Float[Array, "T k"]
) -> Float32[Array, "T D"]:
    """The sum over each token's choices of its expert's output, in float32.

    `kernels` is a pytree of arrays that lead with the X experts; a `choice` of X or more is nobody's. The backward
    pass computes each block again, so nothing is kept but the arguments.
    """
    return _forward(expert, kernels, x, choice, weight)[0]


def _forward(expert, kernels, x, choice, weight):
    order, starts, sizes = _sort(choice, _count(kernels))
    weights = weight.reshape(-1)

    def one_expert(out, inputs):
        kernel, start, size = inputs

        def visit(first, count, out):
            slots, tokens, real = _block(order, start, size, first, count, choice.shape)
            y = expert(kernel, x[tokens], weights[slots], ONE_EXPERT)
            return _add(out, tokens, real, y)

        return _visit(size, visit, out), None

    out, _ = lax.scan(one_expert, jnp.zeros_like(x, jnp.float32), (kernels, starts, sizes))
    return out, (kernels, x, choice, weight)


def _backward(expert, saved, d_out):
    kernels, x, choice, weight = saved
    order, starts, sizes = _sort(choice, _count(kernels))
    weights = weight.reshape(-1)

    def one_expert(carry, inputs):
        kernel, start, size = inputs

        def visit(first, count, carry):
            d_kernel, dx, d_weights = carry
            slots, tokens, real = _block(order, start, size, first, count, choice.shape)
            y, pull = jax.vjp(lambda *primals: expert(*primals, ONE_EXPERT), kernel, x[tokens], weights[slots])
            d_block, dx_block, d_weight = pull(jnp.where(real[:, None], d_out[tokens], 0).astype(y.dtype))
            d_kernel = jax.tree.map(lambda total, part: total + part.astype(jnp.float32), d_kernel, d_block)
            # The rows past the last real one are zeros, which the next block writes over.
            d_weights = lax.dynamic_update_slice_in_dim(d_weights, d_weight, start + first, 0)
            return d_kernel, _add(dx, tokens, real, dx_block), d_weights

        zeros = jax.tree.map(lambda a: jnp.zeros_like(a, jnp.float32), kernel)
        d_kernel, *carry = _visit(size, visit, (zeros, *carry))
        return tuple(carry), jax.tree.map(lambda d, a: d.astype(a.dtype), d_kernel, kernel)

    carry = (jnp.zeros_like(x, jnp.float32), jnp.zeros_like(weight, shape=weights.size + BLOCKS[0]))
    (dx, d_weights), d_kernels = lax.scan(one_expert, carry, (kernels, starts, sizes))
    d_weight = jnp.zeros_like(weights).at[order[: weights.size]].set(d_weights[: weights.size]).reshape(weight.shape)
    return d_kernels, dx.astype(x.dtype), np.zeros(choice.shape, jax.dtypes.float0), d_weight


grouped.defvjp(_forward, _backward)


def blocks(size: int) -> list[int]:
    """The sizes of the blocks that so many rows are computed in."""
    found = []
    for block in BLOCKS[:-1]:
        found += [block] * (size // block)
        size %= block
    return found + [BLOCKS[-1]] * -(-size // BLOCKS[-1])


def _visit(size: Int[Array, ""], visit: Callable, carry: Any) -> Any:
    """Call `visit(first row, rows of the block, carry)` for the `blocks` of an expert that has `size` rows."""
    first = jnp.zeros_like(size)
    for block in BLOCKS:
        count = (size - first) // block if block != BLOCKS[-1] else -(-(size - first) // block)
        step = functools.partial(_step, visit, first, block)
        carry, first = lax.fori_loop(0, count, step, carry), first + count * block
    return carry


def _step(visit, first, block, index, carry):
    return visit(first + index * block, block, carry)


def _sort(choice: Int[Array, "T k"], experts: int) -> tuple[Int[Array, " slots"], Int[Array, " X"], Int[Array, " X"]]:
    """The choices' numbers sorted by expert, followed by zeros for a block to end in; each expert's first, and count.

    Choice number s is the one numbered s % k of token s // k.
    """
    flat = choice.reshape(-1)
    sizes = (flat[:, None] == jnp.arange(experts)).sum(0, dtype=jnp.int32)
    order = jnp.argsort(flat, stable=True)
    return jnp.pad(order, (0, BLOCKS[0])), jnp.cumsum(sizes) - sizes, sizes


def _block(order, start, size, first, count, shape):
    """Numbers of the choices and tokens of a block, and which of them are real."""
    slots = lax.dynamic_slice_in_dim(order, start + first, count)
    return slots, slots // shape[1], jnp.arange(count) < size - first


def _add(out: Array, tokens: Array, real: Array, y: Array) -> Array:
    return out.at[jnp.where(real, tokens, len(out))].add(y.astype(out.dtype), mode="drop")


def _dot(x: Array, kernel: Array) -> Array:
    return lax.dot_general(x, kernel, (((1,), (0,)), ((), ())))


def _count(kernels: Any) -> int:
    return jax.tree.leaves(kernels)[0].shape[0]


ONE_EXPERT = Rows(dot=_dot, pick=lambda vector: vector)
