"""tokamax's kernels for products of groups, which exist only on GPUs, and what they need to be right.

Every private entry point of tokamax that grouped products use is in this file; those of attention are in `gpu`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from omnijax.errors import UserError
from omnijax.nn.chunked import TO_KERNEL

_MEND = "use the experts' kernel blocks"

# Given, as tokamax's own choice depends on tables of measurements, some of them for blocks that are too long (below).
_TILES = {
    "mosaic_gpu": {
        "block_m": 128,
        "block_n": 64,
        "block_k": 128,
        "num_stages": 4,
        "split_k": 1,
        "persistent": False,
        "grid_block_n": 4,
        "grid_tile_width": 4,
    },
    "triton": {"block_m": 128, "block_n": 128, "block_k": 32, "num_warps": 4, "num_stages": 4},
}


def tokamax(left: Array, right: Array, sizes: Int[Array, " X"], numbers: lax.RaggedDotDimensionNumbers) -> Array:
    """The `omnijax.nn.chunked.Product` of tokamax: its Mosaic kernel on Hopper, or its Triton kernel.

    By kernels Mosaic is the faster one, and Triton for the gradient of kernels: on an H100 3.9 ms and 0.75 ms for
    [131072, 2048] by [131072, 768] and 128 experts, by the measurements that tokamax 0.0.12 is shipped with. To an
    empty group that Triton kernel gives the product of the 32 rows before, which must exist.

    Raises `UserError` for float32, where tokamax is not installed, and where neither kernel takes these arrays here.
    """
    dtypes = {left.dtype, right.dtype}
    if dtypes not in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)}):
        raise UserError(
            f"experts: the kernel tokamax takes rows and kernels all in bfloat16 or all in float16, not "
            f"{', '.join(sorted(map(str, dtypes)))}; {_MEND}"
        )
    kernels, is_hopper = _tokamax_parts()
    order, reasons = ("triton", "mosaic_gpu") if numbers == TO_KERNEL else ("mosaic_gpu", "triton"), []
    for name in order:
        if name not in kernels:
            reasons.append(f"{name}: not in this tokamax")
        elif name == "mosaic_gpu" and not is_hopper:
            reasons.append(f"{name}: needs a Hopper GPU")
        elif name == "mosaic_gpu" and numbers != TO_KERNEL and not _in_whole_blocks(left, right, numbers):
            reasons.append(f"{name}: needs widths that are multiples of 128")
        else:
            try:
                return _without_axes(_configured(name, kernels[name]), left, right, sizes, numbers)
            except NotImplementedError as error:
                reasons.append(f"{name}: {error}")
    raise UserError(f"experts: no kernel of tokamax takes these arrays here ({'; '.join(reasons)}); {_MEND}")


def _in_whole_blocks(left: Array, right: Array, numbers: lax.RaggedDotDimensionNumbers) -> bool:
    """tokamax 0.0.12 leaves out, without a word, the end of a contracted width that its blocks do not divide."""
    (_, (contracted,)), _ = numbers.dot_dimension_numbers
    outputs = right.shape[3 - contracted]
    return left.shape[1] % 128 == 0 and outputs % 64 == 0


def _without_axes(
    kernel: Callable, left: Array, right: Array, sizes: Array, numbers: lax.RaggedDotDimensionNumbers
) -> Array:
    """Call a kernel that does not say over which mesh axes its results differ: over those of its arguments."""

    def call(left: Array, right: Array, sizes: Array) -> Array:
        return kernel(
            left,
            right,
            group_sizes=sizes,
            ragged_dot_dimension_numbers=numbers,
            preferred_element_type=left.dtype,
        )

    if not jax.sharding.get_abstract_mesh().manual_axes:
        return call(left, right, sizes)
    everywhere = PartitionSpec()
    alone = jax.shard_map(call, in_specs=everywhere, out_specs=everywhere, axis_names=set(), check_vma=False)
    axes = tuple(jax.typeof(left).manual_axis_type.varying)
    return lax.pcast(alone(left, right, sizes), axes, to="varying")


def _configured(name: str, kernel: Any) -> Any:
    # Not all versions know all fields.
    known = {field.name for field in dataclasses.fields(kernel.config_cls)}
    return kernel.replace(config=kernel.config_cls(**{k: v for k, v in _TILES[name].items() if k in known}))


def _tokamax_parts() -> tuple[Any, bool]:
    """tokamax's grouped products by name, and whether its kernels for Hopper run here."""
    try:
        from absl import flags
        from tokamax._src import gpu_utils
        from tokamax._src.ops.ragged_dot import api
    except ImportError as error:
        raise UserError(
            f"experts: the kernel tokamax cannot be imported ({error}); run pip install 'omnijax[tokamax]', or {_MEND}"
        ) from error
    # Else tokamax reads the program's command line for flags of its own, and fails at ours.
    flags.FLAGS.mark_as_parsed()
    # The second name is that of versions for jax 0.11 and newer.
    return getattr(api, "IMPLEMENTATIONS", None) or api._IMPLEMENTATIONS, gpu_utils.is_sm90()
