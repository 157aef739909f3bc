"""The device mesh: five axes, in the order of their links' speed, slowest first."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from omnijax.errors import UserError
from omnijax.sharding import MESH_AXES


def make_mesh(
    *,
    replica: int = 1,
    data: int = -1,
    expert: int = 1,
    sequence: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh over all `devices` (default: every device of every process). One size may be -1: all that is left.

    Raises `UserError` where the sizes do not multiply to the number of devices, and where one is given twice.
    """
    available = jax.devices() if devices is None else devices
    if not len(available) or len(set(available)) != len(available):
        raise UserError(f"mesh: {len(available)} devices, {len(set(available))} of them different; name each once")
    sizes = dict(zip(MESH_AXES, (replica, data, expert, sequence, tensor), strict=True))
    shape, types = mesh_shape(sizes, len(available)), (AxisType.Auto,) * len(MESH_AXES)
    if math.prod(shape) != len(available):
        raise UserError(
            f"mesh {_describe(sizes)}: the sizes take {math.prod(shape)} devices, there are {len(available)}; "
            f"change a size, or write -1 for one of them"
        )
    if devices is None:  # jax knows which of the cluster's devices have fast links
        return jax.make_mesh(shape, MESH_AXES, axis_types=types)
    return Mesh(np.asarray(devices).reshape(shape), MESH_AXES, axis_types=types)


def mesh_shape(sizes: Mapping[str, int], devices: int) -> tuple[int, ...]:
    """`sizes` in order, where -1 takes what the others leave of `devices`.

    Raises `UserError` for a size that is neither positive nor the only -1, or where `devices` leave no whole number.
    """
    if any(not isinstance(size, int | np.integer) or (size < 1 and size != -1) for size in sizes.values()):
        raise UserError(f"mesh {_describe(sizes)}: a size is a positive integer, or -1 for all devices that are left")
    left = [axis for axis, size in sizes.items() if size == -1]
    if len(left) > 1:
        raise UserError(f"mesh {_describe(sizes)}: only one size may be -1, not {' and '.join(left)}")
    product = math.prod(size for size in sizes.values() if size != -1)
    if left and devices % product:
        raise UserError(
            f"mesh {_describe(sizes)}: {left[0]} takes the devices that are left, but the {devices} here are no "
            f"multiple of {product}; give its size, or change another"
        )
    return tuple(devices // product if size == -1 else size for size in sizes.values())


def _describe(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())
