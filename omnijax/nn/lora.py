"""Linear maps and experts with low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): W acts as W + s A B.

The product A B is never made: rows go through A, then B, so that training them needs no gradient of W.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flax import nnx
from jaxtyping import Array, Float

from omnijax.nn.dropout import dropout
from omnijax.nn.grouped import Expert, Rows
from omnijax.nn.projections import Linear, contract
from omnijax.sharding import constrain


class LoraLinear(Linear):
    """A `Linear` whose `lora_a` is `[*inputs, rank]`, and whose `lora_b` is `[rank, *outputs]`.

    Where there is a `lora_number`, which no other adapter has, A gets its input after dropout of the share `rate`.
    """

    def __init__(
        self,
        base: Linear,
        lora_a: nnx.Param,
        lora_b: nnx.Param,
        *,
        scale: float,
        rate: float = 0.0,
        lora_number: nnx.Param | None = None,
    ):
        self.kernel, self.bias, self.lora_a, self.lora_b = base.kernel, base.bias, lora_a, lora_b
        self.scale, self.rate, self.lora_number = scale, rate, lora_number

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        y = super().__call__(x)
        if self.lora_number is not None:
            x = dropout(x, self.rate, self.lora_number[...])
        narrow = contract(x, self.lora_a[...], self.kernel.inputs)
        # Where inputs are split over devices, the sum over these is of the narrow vector, not of the output.
        narrow = constrain(narrow, "batch", "length", *(None,) * (narrow.ndim - 2))
        return y + contract(self.scale * narrow, self.lora_b[...], 1)


def adapter_names(kernel: str) -> tuple[str, str]:
    """The names of A and B of a kernel, of which they stand beside: `up_kernel` has `up_lora_a` and `up_lora_b`."""
    stem = kernel.removesuffix("kernel")
    return f"{stem}lora_a", f"{stem}lora_b"


class LoraExperts(nnx.Module):
    """Experts, some kernels of which have adapters: `[experts, inputs, rank]` and `[experts, rank, *outputs]`."""

    def __init__(self, base: Any, adapters: Mapping[str, nnx.Param], *, adapted: tuple[str, ...], scale: float):
        variables = {str(path[0]): variable for path, variable in nnx.iter_graph(base) if path and path[1:] == ()}
        for name, variable in (variables | dict(adapters)).items():
            setattr(self, name, variable)
        self.expert = AdaptedExpert(base.expert, adapted, scale)


class _Adapted(NamedTuple):
    kernel: Array
    lora_a: Array
    lora_b: Array


@dataclass(frozen=True)
class AdaptedExpert:
    """An `omnijax.nn.grouped.Expert` that multiplies by kernels with adapters where the plain one does by kernels."""

    plain: Expert
    adapted: tuple[str, ...]
    scale: float

    def __call__(
        self, kernels: Mapping[str, Array], x: Float[Array, "n D"], weight: Float[Array, " n"], rows: Rows
    ) -> Float[Array, "n D"]:
        def dot(x: Array, kernel: Any) -> Array:
            if not isinstance(kernel, _Adapted):
                return rows.dot(x, kernel)
            return rows.dot(x, kernel.kernel) + rows.dot(self.scale * rows.dot(x, kernel.lora_a), kernel.lora_b)

        pairs = {
            name: _Adapted(kernels[name], *(kernels[each] for each in adapter_names(name))) for name in self.adapted
        }
        return self.plain({**kernels, **pairs}, x, weight, Rows(dot, rows.pick))
