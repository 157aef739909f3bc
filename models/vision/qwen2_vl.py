"""The vision tower of Qwen2-VL (arXiv 2409.12191, sec. 2.1): any resolution, rotary positions in height and width."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
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
)
from models.vision.config import VisionConfig
from omnijax.batch import Media
from omnijax.hf_layout import Names
from omnijax.nn.norms import LayerNorm
from omnijax.nn.remat import Remat

EPS = 1e-6


@dataclass(frozen=True)
class Qwen2VLVisionConfig(VisionConfig):
    """`embed_dim` is the tower's width, `hidden_size` that of the tokens it gives."""

    embed_dim: int = 1280
    hidden_size: int = 3584
    mlp_ratio: float | int = 4

    HF_TYPES: ClassVar[tuple[str, ...]] = ("qwen2_vl_vision", "qwen2_vl")
    HF_FIXED: ClassVar[dict[str, Any]] = {"hidden_act": "quick_gelu"}

    def __post_init__(self) -> None:
        self.check_heads(self.embed_dim)

    def build(self, **options: Any) -> "Qwen2VLVision":
        """The tower with fresh float32 parameters."""
        return Qwen2VLVision(self, **options)


class Qwen2VLVision(nnx.Module):
    """Patches in merge order (`models.vision.patches`) to merged tokens, in the same order."""

    Config = Qwen2VLVisionConfig

    HF_NAMES: ClassVar[Names] = {
        "visual.patch_embed.proj.weight": "patch_embed.kernel",
        **{
            f"visual.blocks.{{layer}}.{name}.{theirs}": f"layers.{name}.{ours}"
            for name in ("norm1", "norm2")
            for theirs, ours in (("weight", "scale"), ("bias", "bias"))
        },
        **TowerBlock.HF_NAMES,
        **{
            f"visual.blocks.{{layer}}.mlp.{name}.{theirs}": f"layers.mlp.{name}.{ours}"
            for name in ("fc1", "fc2")
            for theirs, ours in (("weight", "kernel"), ("bias", "bias"))
        },
        "visual.merger.ln_q.weight": "merger.ln_q.scale",
        "visual.merger.ln_q.bias": "merger.ln_q.bias",
        **PatchMerger.HF_NAMES,
    }

    def __init__(self, config: Qwen2VLVisionConfig, *, rngs: nnx.Rngs, remat: Remat = "none"):
        c, width, std = config, config.embed_dim, config.initializer_range
        hidden = int(width * c.mlp_ratio)

        def norm(rngs: nnx.Rngs) -> LayerNorm:
            return LayerNorm("embed", width, eps=EPS, rngs=rngs)

        def block(rngs: nnx.Rngs) -> TowerBlock:
            return TowerBlock(
                norm1=norm(rngs),
                attn=FusedAttention(width=width, num_heads=c.num_heads, std=std, rngs=rngs),
                norm2=norm(rngs),
                mlp=MLP(width=width, hidden=hidden, activation=quick_gelu, std=std, rngs=rngs),
            )

        self.config = c
        self.patch_embed = PatchEmbedding(c.patch_shape, width, std=std, rngs=rngs)
        self.stacks = nnx.List([TowerStack(block, [0] * c.depth, remat=remat, rngs=rngs)])
        merged, out = c.spatial_merge_size**2, c.hidden_size
        self.merger = PatchMerger(norm(rngs), merged=merged, width=width, out=out, std=std, rngs=rngs)

    def __call__(self, media: Media) -> Float[Array, "B M out"]:
        """One token for each `spatial_merge_size`^2 units; `unit_positions` are (time, height, width) in patches."""
        c, positions = self.config, media.unit_positions
        rotation = axial_rotation(positions, c.embed_dim // c.num_heads, c.rope_theta)
        choices = (frames(positions, media.unit_segments > 0),)
        return self.merger(self.stacks[0](self.patch_embed(media.features), rotation, choices))


def quick_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x sigmoid(1.702 x)` (Hendrycks & Gimpel 2016, sec. 2)."""
    return x * jax.nn.sigmoid(1.702 * x)
