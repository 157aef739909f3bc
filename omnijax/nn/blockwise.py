"""Blockwise attention in plain JAX: every device computes its own queries, with a gradient of its own.

`omnijax.nn.blocks` holds what one device computes, `omnijax.nn.ring` how keys come to it where tokens stay split.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from omnijax.errors import UserError
from omnijax.nn import ring
from omnijax.nn.blocks import Options, backward_rows, forward_rows
from omnijax.nn.spans import Span
from omnijax.sharding import activation_spec, current_rules


class _Static(NamedTuple):
    """What is known when the program is traced."""

    options: Options
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

    Where a table is in use, every device computes its own rows, heads and, in a ring, queries. Raises `UserError`
    where Ulysses' table splits the tokens inside attention.
    """
    spec = activation_spec(q.shape, *inside_axes())
    if spec is not None and spec[1] is not None and not is_ring():
        raise UserError(
            f"attention: the blockwise kernel needs all tokens of a head on one device, but the table splits them "
            f'over {spec[1]}; write attention_length="none", or Layout(attention="ring")'
        )
    if jax.sharding.get_abstract_mesh().size == 1:
        spec = None
    dtype = q.dtype if spec is None or spec[1] is None else jnp.float32
    static = _Static(Options(scale, soft_cap, query_block, key_block, dtype), spec)
    out, log_total = _attention(static, q, k, v, *span)
    if sinks is None:
        return out
    # A sink has no value: all it does is take exp(sink) / (total + exp(sink)) away from the other keys.
    return (out * jax.nn.sigmoid(log_total - sinks)[..., None]).astype(q.dtype)


def is_ring() -> bool:
    """Whether the table in use keeps tokens split inside attention."""
    rules = current_rules()
    return rules is not None and rules.layout.attention == "ring"


def inside_axes() -> tuple[str, str, str, None]:
    """The names of the axes of q, k, v and the output inside attention."""
    tokens, heads = ("length", "act_heads") if is_ring() else ("attention_length", "attention_heads")
    return "batch", tokens, heads, None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static, q, k, v, start, end):
    """Returns out [B, S, H, Dv] and log_total [B, S, H], the logarithm of the softmax's denominator."""
    return _forward(static, q, k, v, start, end)[0]


def _forward(static, q, k, v, start, end):
    out, log_total = _per_device(forward_rows, ring.forward, static, (q, k, v, start, end), out_ranks=(4, 3))
    out = out.astype(q.dtype)
    return (out, log_total), (q, k, v, start, end, out, log_total)


def _backward(static, saved, gradients):
    q, k, v, start, end, out, log_total = saved
    d_out, d_log_total = gradients
    delta = jnp.einsum("bshd,bshd->bsh", out, d_out, preferred_element_type=jnp.float32) - d_log_total
    arguments = (q, k, v, start, end, log_total, delta, d_out)
    dq, dk, dv = _per_device(backward_rows, ring.backward, static, arguments, out_ranks=(4, 4, 4))
    no_gradient = np.zeros(start.shape, jax.dtypes.float0)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), no_gradient, no_gradient


_attention.defvjp(_forward, _backward)


def _per_device(
    alone: Callable, in_ring: Callable, static: _Static, arguments: tuple, out_ranks: tuple[int, ...]
) -> tuple:
    """`alone` or, where tokens are split, `in_ring` on what each device holds; a rank tells which axes an array has."""
    options, spec = static
    if spec is None:
        return alone(options, *arguments)
    rows, tokens, heads, _ = spec
    function = functools.partial(alone, options) if tokens is None else functools.partial(in_ring, tokens, options)
    specs = {4: spec, 3: PartitionSpec(rows, tokens, heads), 2: PartitionSpec(rows, tokens)}
    mesh = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        function,
        in_specs=jax.tree.map(lambda x: specs[x.ndim], arguments),
        out_specs=tuple(specs[rank] for rank in out_ranks),
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
    )(*arguments)
