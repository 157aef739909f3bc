"""Experts applied to the tokens that chose them: one function; `use_grouped` decides who computes it.

A kernel multiplies rows by the kernels of their experts. `blocks` takes one expert after the other, in plain XLA; the
others sort rows and multiply those of many experts at once.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jaxtyping import Array, Float, Float32, Int

from omnijax.errors import UserError
from omnijax.nn.chunked import Product, chunked, ragged
from omnijax.nn.gpu_grouped import tokamax
from omnijax.nn.grouped import Expert, grouped

PRODUCTS: dict[str, Product] = {"ragged": ragged, "tokamax": tokamax}
KERNELS = ("blocks", *PRODUCTS)


def apply_experts(
    expert: Expert,
    kernels: Any,
    x: Float[Array, "T D"],
    choice: Int[Array, "T k"],
    weight: Float[Array, "T k"],
    *,
    share: int = 1,
) -> Float32[Array, "T D"]:
    """The sum over each token's choices of its expert's output, in float32; see `omnijax.nn.grouped.grouped`.

    `share` says on how many devices together the choices are computed; those of other devices are nobody's here. It
    sets how many rows are computed at a time, never what is computed.
    """
    kernel = chosen_grouped()
    if kernel == "blocks":
        return grouped(expert, kernels, x, choice, weight)
    rows = -(-choice.size // (share * 128)) * 128
    return chunked(PRODUCTS[kernel], rows, expert, kernels, x, choice, weight)


# The kernel enters jit's cache key, so two kernels never share a compiled program.
_kernel = jax.make_user_context(default_value="auto")


@contextlib.contextmanager
def use_grouped(name: str) -> Iterator[None]:
    """Inside this context `apply_experts` runs this kernel: "auto" or one of `KERNELS`, else a `UserError`."""
    if name != "auto" and name not in KERNELS:
        raise UserError(f"experts' kernel '{name}' does not exist; choose one of auto, {', '.join(KERNELS)}")
    with _kernel(name):
        yield


def chosen_grouped() -> str:
    """The kernel that `apply_experts` runs here."""
    return "blocks" if _kernel.value == "auto" else _kernel.value
