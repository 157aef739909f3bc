"""The device mesh: five axes, in the order of their links' speed, slowest first."""

import math
from collections.abc import Sequence

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

    Raises `UserError` where the sizes do not multiply to the number of devices.
    """
    available = jax.devices() if devices is None else devices
    sizes = dict(zip(MESH_AXES, (replica, data, expert, sequence, tensor), strict=True))
    described = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    if any(size < 1 and size != -1 for size in sizes.values()):
        raise UserError(f"mesh {described}: a size is a positive number, or -1 for all devices that are left")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise UserError(f"mesh {described}: only one size may be -1, not {' and '.join(open_axes)}")
    product = math.prod(size for size in sizes.values() if size != -1)
    if open_axes and len(available) % product == 0:
        sizes[open_axes[0]] = len(available) // product
        product = len(available)
    if product != len(available):
        raise UserError(
            f"mesh {described}: the sizes take {product} devices{' or a multiple' if open_axes else ''}, "
            f"there are {len(available)}; change a size, or write -1 for one of them"
        )
    shape, types = tuple(sizes.values()), (AxisType.Auto,) * len(MESH_AXES)
    if devices is None:  # jax knows which of the cluster's devices have fast links
        return jax.make_mesh(shape, MESH_AXES, axis_types=types)
    return Mesh(np.asarray(devices).reshape(shape), MESH_AXES, axis_types=types)
