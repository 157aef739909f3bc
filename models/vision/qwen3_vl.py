"""The vision tower of Qwen3-VL (Qwen3-VL Technical Report, arXiv 2511.21631): interpolated positions and deepstack.

Qwen3-VL-MoE and Qwen3-Omni have the same tower.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.towers import (
    MLP,
    FusedAttention,
    PatchEmbedding,
    PatchMerger,
    TowerBlock,
    TowerStack,
    axial_rotation,
    frames,
    stacked,
    tanh_gelu,
)
from models.vision.config import VisionConfig
from models.vision.position_table import PositionTable, linear_taps
from omnijax.batch import Media
from omnijax.errors import UserError
from omnijax.hf_layout import Names
from omnijax.nn.norms import LayerNorm
from omnijax.nn.remat import Remat

EPS = 1e-6


@dataclass(frozen=True)
class Qwen3VLVisionConfig(VisionConfig):
    """The outputs of the layers `deepstack_visual_indexes` become features for the language model's first layers."""

    depth: int = 27
    patch_size: int = 16
    hidden_size: int = 1152
    intermediate_size: int = 4304
    out_hidden_size: int = 3584
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)

    HF_TYPES: ClassVar[tuple[str, ...]] = (
        "qwen3_vl_vision",
        "qwen3_vl",
        "qwen3_vl_moe_vision",
        "qwen3_vl_moe",
        "qwen3_omni_moe_vision_encoder",
    )
    HF_FIXED: ClassVar[dict[str, Any]] = {"hidden_act": "gelu_pytorch_tanh"}
    ELSEWHERE: ClassVar[tuple[str, ...]] = (*VisionConfig.ELSEWHERE, "image_size", "apply_vit_abs_pos_embed")

    def __post_init__(self) -> None:
        self.check_heads(self.hidden_size)
        if math.isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise UserError(
                f"Qwen3VLVisionConfig.num_position_embeddings = {self.num_position_embeddings} must be a square, as "
                f"positions lie on one"
            )
        layers = self.deepstack_visual_indexes
        if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < self.depth:
            raise UserError(
                f"Qwen3VLVisionConfig.deepstack_visual_indexes = {list(layers)} must be layers of 0..{self.depth - 1}, "
                f"each larger than the one before"
            )

    def build(self, **options: Any) -> "Qwen3VLVision":
        """The tower with fresh float32 parameters."""
        return Qwen3VLVision(self, **options)


def _names(visual: str, mergers: str, norm: str, linear_1: str, linear_2: str) -> Names:
    """The names of a checkpoint: what the tower is called, its deepstack mergers, and the parts of a merger."""
    norms = (("weight", "scale"), ("bias", "bias"))
    linears = (("weight", "kernel"), ("bias", "bias"))
    parts = ((norm, "ln_q", norms), (linear_1, "linear_1", linears), (linear_2, "linear_2", linears))
    return {
        f"{visual}.patch_embed.proj.weight": "patch_embed.kernel",
        f"{visual}.patch_embed.proj.bias": "patch_embed.bias",
        f"{visual}.pos_embed.weight": "pos_embed.embedding",
        **{
            f"{visual}.blocks.{{layer}}.{name}.{theirs}": f"layers.{name}.{ours}"
            for name in ("norm1", "norm2")
            for theirs, ours in norms
        },
        **{name.replace("visual", visual, 1): path for name, path in TowerBlock.HF_NAMES.items()},
        **{
            f"{visual}.blocks.{{layer}}.mlp.linear_{name}.{theirs}": f"layers.mlp.{name}.{ours}"
            for name in ("fc1", "fc2")
            for theirs, ours in linears
        },
        **{
            f"{visual}.{merger}.{part}.{theirs}": f"{path}.{name}.{ours}"
            for merger, path in (("merger", "merger"), (f"{mergers}.{{layer}}", "deepstack.layers"))
            for part, name, suffixes in parts
            for theirs, ours in suffixes
        },
    }


class Qwen3VLVision(nnx.Module):
    """Patches in merge order (`models.vision.patches`) to merged tokens, in the same order."""

    Config = Qwen3VLVisionConfig

    HF_NAMES: ClassVar[Names] = _names("model.visual", "deepstack_merger_list", "norm", "linear_fc1", "linear_fc2")
    HF_OTHER_NAMES: ClassVar[tuple[Names, ...]] = (
        _names("visual", "merger_list", "ln_q", "mlp.0", "mlp.2"),
        _names("thinker.visual", "merger_list", "ln_q", "mlp.0", "mlp.2"),
    )

    def __init__(self, config: Qwen3VLVisionConfig, *, rngs: nnx.Rngs, remat: Remat = "none"):
        c, width, std, merged = config, config.hidden_size, config.initializer_range, config.spatial_merge_size**2

        def norm(rngs: nnx.Rngs, size: int = width) -> LayerNorm:
            return LayerNorm("embed", size, eps=EPS, rngs=rngs)

        def block(rngs: nnx.Rngs) -> TowerBlock:
            return TowerBlock(
                norm1=norm(rngs),
                attn=FusedAttention(width=width, num_heads=c.num_heads, std=std, rngs=rngs),
                norm2=norm(rngs),
                mlp=MLP(width=width, hidden=c.intermediate_size, activation=tanh_gelu, std=std, rngs=rngs),
            )

        def merger(rngs: nnx.Rngs, joined_first: bool = False) -> PatchMerger:
            own = norm(rngs, merged * width if joined_first else width)
            out = c.out_hidden_size
            return PatchMerger(own, merged=merged, width=width, out=out, std=std, rngs=rngs, joined_first=joined_first)

        self.config = c
        self.patch_embed = PatchEmbedding(c.patch_shape, width, std=std, rngs=rngs, bias=True)
        side = math.isqrt(c.num_position_embeddings)
        self.pos_embed = PositionTable(side, width, linear_taps, std=std, rngs=rngs)
        # A stack ends where its output is wanted: one scan that gave every layer's would keep them all.
        ends = [layer + 1 for layer in c.deepstack_visual_indexes]
        edges = sorted({0, *ends, c.depth})
        self.stacks = nnx.List(
            TowerStack(block, [0] * (end - start), remat=remat, rngs=rngs) for start, end in itertools.pairwise(edges)
        )
        self.deepstack = Mergers(lambda rngs: merger(rngs, joined_first=True), len(ends), rngs)
        self.merger = merger(rngs)

    def __call__(self, media: Media) -> Float[Array, "B M out"]:
        """One token for each `spatial_merge_size`^2 units; `unit_positions` are (time, height, width) in patches."""
        return self.with_deepstack(media)[0]

    def with_deepstack(self, media: Media) -> tuple[Float[Array, "B M out"], Float[Array, "levels B M out"]]:
        """The tokens, and the features of the same tokens at each of the layers `deepstack_visual_indexes`."""
        c, positions = self.config, media.unit_positions
        rotation = axial_rotation(positions, c.hidden_size // c.num_heads, c.rope_theta)
        choices = (frames(positions, media.unit_segments > 0),)
        x = self.patch_embed(media.features) + self.pos_embed(positions, media.unit_grid)
        found = []
        for stack in self.stacks:
            found.append(x := stack(x, rotation, choices))
        return self.merger(x), self.deepstack(jnp.stack(found[: len(c.deepstack_visual_indexes)]))


class Mergers(nnx.Module):
    """One merger a level, stacked as layers are."""

    def __init__(self, make: Callable[[nnx.Rngs], PatchMerger], levels: int, rngs: nnx.Rngs):
        self.stacks = nnx.List([nnx.Dict(blocks=nnx.List([stacked(make, levels, rngs)]))])

    def __call__(self, x: Float[Array, "levels B N E"]) -> Float[Array, "levels B M out"]:
        graphdef, state = nnx.split(self.stacks[0]["blocks"][0])
        return jax.lax.map(lambda level: nnx.merge(graphdef, level[0])(level[1]), (state, x))
