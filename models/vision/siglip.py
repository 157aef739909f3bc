"""The vision tower of SigLIP (Zhai et al. 2023, arXiv 2303.15343), also Janus's (arXiv 2410.13848)."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float

from models.towers import (
    MLP,
    FusedAttention,
    PatchEmbedding,
    TowerBlock,
    TowerStack,
    exact_gelu,
    frames,
    tanh_gelu,
)
from models.vision.config import TowerConfig
from models.vision.position_table import PositionTable, cubic_taps
from omnijax.batch import Media
from omnijax.errors import UserError
from omnijax.hf_layout import Names, Part
from omnijax.nn.norms import LayerNorm
from omnijax.nn.remat import Remat

ACTIVATIONS = {"gelu_pytorch_tanh": tanh_gelu, "gelu": exact_gelu}
OWN_TENSOR = re.compile(r"(model\.)?(vision_model\.)?(embeddings|encoder|post_layernorm)\.")


@dataclass(frozen=True)
class SigLIPVisionConfig(TowerConfig):
    """Fields are named as in the `vision_config` of a `config.json`; sizes of pictures and patches are in pixels."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    HF_TYPES: ClassVar[tuple[str, ...]] = ("siglip_vision_model", "janus_vision_model")
    HF_FIXED: ClassVar[dict[str, Any]] = {
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_dropout_rate": 0.0,
        "projection_dropout": 0.0,
        "use_qk_norm": False,
    }
    ELSEWHERE: ClassVar[tuple[str, ...]] = (
        "architectures",
        "depth",  # of Janus's projector
        "dtype",
        "num_image_tokens",
        "projection_dim",
        "torch_dtype",
        "transformers_version",
        "vision_use_head",
    )

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"SigLIPVisionConfig.hidden_size = {self.hidden_size} must be a multiple of "
                f"num_attention_heads = {self.num_attention_heads}"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise UserError(f"SigLIPVisionConfig.hidden_act = {self.hidden_act!r} is none of {', '.join(ACTIVATIONS)}")
        if not 0 < self.patch_size <= self.image_size:
            raise UserError(
                f"SigLIPVisionConfig.patch_size = {self.patch_size} must be of 1..image_size = {self.image_size}"
            )

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], name: str = "config.json") -> "SigLIPVisionConfig":
        """As every tower's; Janus says how many times the width the hidden layer of an MLP is."""
        values = dict(values.get("vision_config", values))
        if (ratio := values.pop("mlp_ratio", None)) is not None:
            values["intermediate_size"] = int(values.get("hidden_size", cls.hidden_size) * ratio)
        return super().from_hf(values, name)

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of the tower alone, in SigLIP's form."""
        return {"model_type": self.HF_TYPES[0], **dataclasses.asdict(self), "vision_use_head": False}

    def leaves_out(self, tensor: str) -> bool:
        """Whether a tensor of a checkpoint is of another part of the model, or of the head that pools."""
        return OWN_TENSOR.match(tensor) is None

    def build(self, **options: Any) -> "SigLIPVision":
        """The tower with fresh float32 parameters."""
        return SigLIPVision(self, **options)

    @property
    def patch_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one patch."""
        return self.num_channels, self.patch_size, self.patch_size

    @property
    def side(self) -> int:
        """Patches along a side of a picture of `image_size`."""
        return self.image_size // self.patch_size


def _names(prefix: str, proj: str = "out_proj") -> Names:
    """The names of a checkpoint: what the tower is called, and attention's last map."""
    layer, embeddings = f"{prefix}encoder.layers.{{layer}}", f"{prefix}embeddings"
    norms = (("weight", "scale"), ("bias", "bias"))
    linears = (("weight", "kernel"), ("bias", "bias"))
    return {
        f"{embeddings}.patch_embedding.weight": "patch_embedding.kernel",
        f"{embeddings}.patch_embedding.bias": "patch_embedding.bias",
        f"{embeddings}.position_embedding.weight": "position_embedding.embedding",
        **{
            f"{layer}.layer_norm{number}.{theirs}": f"layers.norm{number}.{ours}"
            for number in (1, 2)
            for theirs, ours in norms
        },
        **{
            f"{layer}.self_attn.{name}.{theirs}": Part(f"layers.attn.qkv.{ours}", index=index)
            for index, name in enumerate(("q_proj", "k_proj", "v_proj"))
            for theirs, ours in linears
        },
        **{f"{layer}.self_attn.{proj}.{theirs}": f"layers.attn.proj.{ours}" for theirs, ours in linears},
        **{
            f"{layer}.mlp.{name}.{theirs}": f"layers.mlp.{name}.{ours}"
            for name in ("fc1", "fc2")
            for theirs, ours in linears
        },
        **{f"{prefix}post_layernorm.{theirs}": f"post_layernorm.{ours}" for theirs, ours in norms},
    }


class SigLIPVision(nnx.Module):
    """Patches, row by row of each picture, to as many tokens; the head that pools them to one is left out.

    A grid other than that of `image_size` has the learned positions interpolated.
    """

    Config = SigLIPVisionConfig

    HF_NAMES: ClassVar[Names] = _names("vision_model.")
    HF_OTHER_NAMES: ClassVar[tuple[Names, ...]] = (_names(""), _names("model.vision_model.", "projection_layer"))

    def __init__(self, config: SigLIPVisionConfig, *, rngs: nnx.Rngs, remat: Remat = "none"):
        c, width, std = config, config.hidden_size, config.initializer_range
        activation = ACTIVATIONS[c.hidden_act]

        def norm(rngs: nnx.Rngs) -> LayerNorm:
            return LayerNorm("embed", width, eps=c.layer_norm_eps, rngs=rngs)

        def block(rngs: nnx.Rngs) -> TowerBlock:
            return TowerBlock(
                norm1=norm(rngs),
                attn=FusedAttention(width=width, num_heads=c.num_attention_heads, std=std, rngs=rngs),
                norm2=norm(rngs),
                mlp=MLP(width=width, hidden=c.intermediate_size, activation=activation, std=std, rngs=rngs),
            )

        self.config = c
        self.patch_embedding = PatchEmbedding(c.patch_shape, width, std=std, rngs=rngs, bias=True)
        self.position_embedding = PositionTable(c.side, width, cubic_taps, std=std, rngs=rngs)
        self.stacks = nnx.List([TowerStack(block, [0] * c.num_hidden_layers, remat=remat, rngs=rngs)])
        self.post_layernorm = norm(rngs)

    def __call__(self, media: Media) -> Float[Array, "B N E"]:
        """One token for each unit; `unit_positions` are (time, height, width) in patches, frames apart."""
        positions = media.unit_positions
        x = self.patch_embedding(media.features) + self.position_embedding(positions, media.unit_grid)
        return self.post_layernorm(self.stacks[0](x, None, (frames(positions, media.unit_segments > 0),)))
