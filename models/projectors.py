"""Projectors: what an encoder gives, brought to the width of a language model.

All are made as `P(width, out, rngs=rngs)`. Those that join units take runs of `merged` of them, as they stand in merge
order (`models.vision.patches`): for pictures a square, for sound neighbours in time.
"""

from dataclasses import dataclass
from typing import Any, Literal

from flax import nnx
from jaxtyping import Array, Float

from models.towers import PatchMerger, exact_gelu
from omnijax.errors import UserError
from omnijax.nn.norms import LayerNorm
from omnijax.nn.projections import Linear
from omnijax.sharding import constrain


@dataclass(frozen=True)
class Projector:
    """A projector in a config: `kind` is one of the modules below, `merged` and `depth` as these have them.

    `merged` units become one token with "patch_merge" and "pixel_shuffle"; "linear" and "mlp" keep every unit.
    """

    kind: Literal["linear", "mlp", "patch_merge", "pixel_shuffle"] = "mlp"
    merged: int = 1
    depth: int = 2

    def __post_init__(self) -> None:
        if self.merged < 1 or (self.merged > 1 and self.kind in ("linear", "mlp")):
            allowed = "1, as it keeps every unit: take patch_merge or pixel_shuffle" if self.merged > 1 else "positive"
            raise UserError(f"Projector.merged = {self.merged} with kind {self.kind!r} must be {allowed}")
        if self.depth < 1:
            raise UserError(f"Projector.depth = {self.depth} must be at least 1")

    def build(self, width: int, out: int, *, rngs: nnx.Rngs) -> Any:
        """The module from features of `width` to tokens of width `out`."""
        if self.kind == "linear":
            return LinearProjector(width, out, rngs=rngs)
        if self.kind == "mlp":
            return MLPProjector(width, out, depth=self.depth, rngs=rngs)
        kind = PatchMergeProjector if self.kind == "patch_merge" else PixelShuffleProjector
        return kind(width, out, merged=self.merged, rngs=rngs)


class LinearProjector(nnx.Module):
    """One linear map (LLaVA, arXiv 2304.08485, sec. 4.1)."""

    def __init__(self, width: int, out: int, *, rngs: nnx.Rngs, std: float = 0.02):
        self.linear = Linear((("embed", width),), (("mlp", out),), std=std, bias=True, rngs=rngs)

    def __call__(self, x: Float[Array, "B M E"]) -> Float[Array, "B M out"]:
        return constrain(self.linear(x), "batch", "length", "act_embed")


class MLPProjector(nnx.Module):
    """`depth` linear maps, an exact GELU between two (LLaVA-1.5, arXiv 2310.03744; Janus's aligner)."""

    def __init__(self, width: int, out: int, *, rngs: nnx.Rngs, depth: int = 2, std: float = 0.02):
        if depth < 1:
            raise UserError(f"MLPProjector.depth = {depth} must be at least 1")
        widths, names = (width, *(out,) * depth), ("embed", "mlp")
        # Names alternate, so that a split hidden axis is what the next map contracts.
        axes = [(names[number % 2], size) for number, size in enumerate(widths)]
        self.linears = nnx.List(
            [Linear((axes[i],), (axes[i + 1],), std=std, bias=True, rngs=rngs) for i in range(depth)]
        )

    def __call__(self, x: Float[Array, "B M E"]) -> Float[Array, "B M out"]:
        for number, linear in enumerate(self.linears):
            x = linear(exact_gelu(x) if number else x)
            x = constrain(x, "batch", "length", "act_embed" if number % 2 else "act_mlp")
        return constrain(x, "batch", "length", "act_embed")


class PatchMergeProjector(nnx.Module):
    """Each run of `merged` units becomes one token: normalised, joined, and mapped by an MLP (Qwen2-VL's merger)."""

    def __init__(self, width: int, out: int, *, rngs: nnx.Rngs, merged: int = 4, eps: float = 1e-6, std: float = 0.02):
        norm = LayerNorm("embed", width, eps=eps, rngs=rngs)
        self.merger = PatchMerger(norm, merged=merged, width=width, out=out, std=std, rngs=rngs)

    def __call__(self, x: Float[Array, "B N E"]) -> Float[Array, "B M out"]:
        check_runs(x, self.merger.merged)
        return self.merger(x)


class PixelShuffleProjector(nnx.Module):
    """Each run of `merged` units becomes one token: their channels side by side, mapped linearly (arXiv 2504.05299)."""

    def __init__(self, width: int, out: int, *, rngs: nnx.Rngs, merged: int = 4, std: float = 0.02):
        inputs = ((None, merged), ("embed", width))
        self.linear, self.merged = Linear(inputs, (("mlp", out),), std=std, rngs=rngs), merged

    def __call__(self, x: Float[Array, "B N E"]) -> Float[Array, "B M out"]:
        check_runs(x, self.merged)
        x = x.reshape(x.shape[0], -1, self.merged, x.shape[-1])
        return constrain(self.linear(x), "batch", "length", "act_embed")


def check_runs(x: Float[Array, "B N E"], merged: int) -> None:
    """Raises `UserError` where rows are not whole runs of `merged` units."""
    if x.shape[1] % merged:
        raise UserError(
            f"a row of {x.shape[1]} units is not whole runs of merged = {merged}: make it {-x.shape[1] % merged} longer"
        )
