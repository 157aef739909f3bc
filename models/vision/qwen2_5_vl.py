"""The vision tower of Qwen2.5-VL (Qwen2.5-VL Technical Report, arXiv 2502.13923, sec. 2.1.1): windows of attention."""

from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float

from models.layers import GatedMLP
from models.towers import (
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
from omnijax.errors import UserError
from omnijax.hf_layout import Names
from omnijax.nn.norms import RMSNorm
from omnijax.nn.remat import Remat

EPS = 1e-6


@dataclass(frozen=True)
class Qwen2_5VLVisionConfig(VisionConfig):
    """Layers attend within windows of `window_size` pixels, those of `fullatt_block_indexes` within the frame."""

    hidden_size: int = 1280
    intermediate_size: int = 3420
    out_hidden_size: int = 3584
    window_size: int = 112
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
    tokens_per_second: float | int = 4

    HF_TYPES: ClassVar[tuple[str, ...]] = ("qwen2_5_vl_vision", "qwen2_5_vl")
    HF_FIXED: ClassVar[dict[str, Any]] = {"hidden_act": "silu"}

    def __post_init__(self) -> None:
        self.check_heads(self.hidden_size)
        if self.window_size < self.patch_size * self.spatial_merge_size:
            raise UserError(
                f"Qwen2_5VLVisionConfig.window_size = {self.window_size} must hold a token of "
                f"{self.patch_size * self.spatial_merge_size} pixels"
            )
        if unknown := [layer for layer in self.fullatt_block_indexes if not 0 <= layer < self.depth]:
            raise UserError(f"Qwen2_5VLVisionConfig.fullatt_block_indexes: {unknown} is not in 0..{self.depth - 1}")

    @property
    def window(self) -> int:
        """Patches along the side of a window."""
        return self.window_size // self.patch_size // self.spatial_merge_size * self.spatial_merge_size

    def build(self, **options: Any) -> "Qwen2_5VLVision":
        """The tower with fresh float32 parameters."""
        return Qwen2_5VLVision(self, **options)


class Qwen2_5VLVision(nnx.Module):
    """Patches in window order (`models.vision.patches`) to merged tokens, in the same order."""

    Config = Qwen2_5VLVisionConfig

    HF_NAMES: ClassVar[Names] = {
        "visual.patch_embed.proj.weight": "patch_embed.kernel",
        "visual.blocks.{layer}.norm1.weight": "layers.norm1.scale",
        "visual.blocks.{layer}.norm2.weight": "layers.norm2.scale",
        **TowerBlock.HF_NAMES,
        **{name.replace("model.layers", "visual.blocks"): path for name, path in GatedMLP.HF_NAMES.items()},
        "visual.merger.ln_q.weight": "merger.ln_q.scale",
        **PatchMerger.HF_NAMES,
    }

    HF_OTHER_NAMES: ClassVar[tuple[Names, ...]] = (
        {name.replace("visual.", "model.visual.", 1): path for name, path in HF_NAMES.items()},
    )

    def __init__(self, config: Qwen2_5VLVisionConfig, *, rngs: nnx.Rngs, remat: Remat = "none"):
        c, std = config, config.initializer_range

        def norm(rngs: nnx.Rngs) -> RMSNorm:
            return RMSNorm("embed", c.hidden_size, eps=EPS, rngs=rngs)

        def block(rngs: nnx.Rngs) -> TowerBlock:
            return TowerBlock(
                norm1=norm(rngs),
                attn=FusedAttention(width=c.hidden_size, num_heads=c.num_heads, std=std, rngs=rngs),
                norm2=norm(rngs),
                mlp=GatedMLP(width=c.hidden_size, hidden=c.intermediate_size, std=std, bias=True, rngs=rngs),
            )

        self.config = c
        self.patch_embed = PatchEmbedding(c.patch_shape, c.hidden_size, std=std, rngs=rngs)
        full = [int(layer in c.fullatt_block_indexes) for layer in range(c.depth)]
        self.stacks = nnx.List([TowerStack(block, full, remat=remat, rngs=rngs)])
        merged, out = c.spatial_merge_size**2, c.out_hidden_size
        self.merger = PatchMerger(norm(rngs), merged=merged, width=c.hidden_size, out=out, std=std, rngs=rngs)

    def __call__(self, media: Media) -> Float[Array, "B M out"]:
        """One token for each `spatial_merge_size`^2 units; `unit_positions` are (time, height, width) in patches."""
        c, positions, real = self.config, media.unit_positions, media.unit_segments > 0
        rotation = axial_rotation(positions, c.hidden_size // c.num_heads, c.rope_theta)
        choices = (frames(positions, real, c.window), frames(positions, real))
        return self.merger(self.stacks[0](self.patch_embed(media.features), rotation, choices))
