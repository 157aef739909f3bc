"""Ring attention (Liu et al. 2023): each device keeps its queries, and keys and values travel around.

With n devices there are n rounds. In each a device attends to the keys that visit it and hands them on, and merges what
it found by the logarithms of the softmaxes' denominators. Spans count keys from the start of the row, so all a device
needs to know of its visitors is how many keys stand before them. Within a round neither the attention nor the links
wait for each other. The last round hands keys on as well: one copy more than needed, and one body for all rounds.

A round in which no query sees a visitor costs no attention (beyond one block of keys), but the ring is as slow as its
busiest device. Devices hold contiguous parts of a row: in causal attention over one long document the first has work in
one round and the last in all n. Packed documents and windows are cheap everywhere.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from omnijax.nn.blocks import Options, backward_rows, forward_rows

MeshAxes = str | tuple[str, ...]


def forward(
    axes: MeshAxes,
    options: Options,
    q: Float[Array, "B S H Dk"],
    k: Float[Array, "B T K Dk"],
    v: Float[Array, "B T K Dv"],
    start: Int[Array, "B S"],
    end: Int[Array, "B S"],
) -> tuple[Float[Array, "B S H Dv"], Float[Array, "B S H"]]:
    """`forward_rows` for the queries of one device, and the keys of all devices along the manual mesh axes `axes`.

    S and T count the tokens of one device. Results are sums over rounds, so `options.dtype` is best float32.
    """

    def visit(carry, before):
        k, v, out, log_total = carry
        part, part_total = forward_rows(options, q, k, v, start - before, end - before)
        whole = jnp.logaddexp(log_total, part_total)
        out = out * jnp.exp(log_total - whole)[..., None] + part * jnp.exp(part_total - whole)[..., None]
        k, v = _hand_on(axes, (k, v))
        return (k, v, out, whole), None

    out = jnp.zeros_like(q, options.dtype, (*q.shape[:3], v.shape[3]))
    log_total = jnp.full_like(q, -1e30, jnp.float32, q.shape[:3])  # as of a query that has seen no key yet
    (_, _, out, log_total), _ = lax.scan(visit, (k, v, out, log_total), _keys_before(axes, k.shape[1]))
    return out, log_total


def backward(
    axes: MeshAxes,
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
    """`backward_rows`, as `forward` is `forward_rows`: dk and dv follow their keys around the ring."""

    def visit(carry, before):
        k, v, dk, dv, dq = carry
        dq_part, dk_part, dv_part = backward_rows(
            options, q, k, v, start - before, end - before, log_total, delta, d_out
        )
        # Gradients travel one round behind their keys: the links would wait for this round's.
        dk, dv = _hand_on(axes, (dk, dv))
        k, v = _hand_on(axes, (k, v))
        return (k, v, dk + dk_part, dv + dv_part, dq + dq_part), None

    zeros = [jnp.zeros_like(x, options.dtype) for x in (k, v, q)]
    (_, _, dk, dv, dq), _ = lax.scan(visit, (k, v, *zeros), _keys_before(axes, k.shape[1]))
    dk, dv = _hand_on(axes, (dk, dv))
    return dq, dk, dv


def _keys_before(axes: MeshAxes, length: int) -> Int[Array, "n"]:
    """For each round, how many keys of the row stand before the `length` keys that visit this device."""
    devices = lax.axis_size(axes)
    return length * ((lax.axis_index(axes) - jnp.arange(devices)) % devices)


def _hand_on(axes: MeshAxes, arrays: tuple[Array, ...]) -> Any:
    devices = lax.axis_size(axes)
    return lax.ppermute(arrays, axes, [(device, (device + 1) % devices) for device in range(devices)])
