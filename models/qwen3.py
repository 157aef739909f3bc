"""Qwen3, dense (Qwen3 Technical Report, arXiv 2505.09388): grouped-query attention with normalised queries and keys."""

from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx

from models.decoder import Decoder, SlidingWindowConfig
from models.layers import GatedMLP, GroupedQueryAttention
from models.stacks import Block, StackPlan
from omnijax.nn.norms import RMSNorm
from omnijax.nn.rope import inverse_frequencies


@dataclass(frozen=True)
class Qwen3Config(SlidingWindowConfig):
    """Fields are named as in the `config.json` of the published checkpoints."""

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int | None = 128
    attention_bias: bool = False

    HF_TYPE: ClassVar[str] = "qwen3"
    HF_CLASS: ClassVar[str] = "Qwen3ForCausalLM"

    def build(self, **options: Any) -> "Qwen3":
        """The model with fresh float32 parameters; `options` are those of `Decoder`."""
        return Qwen3(self, **options)


class Qwen3(Decoder):
    """A decoder of identical layers: one stack."""

    Config = Qwen3Config

    HF_NAMES: ClassVar[dict[str, str]] = {
        **Decoder.HF_NAMES,
        **GroupedQueryAttention.HF_NAMES,
        **GatedMLP.HF_NAMES,
        "model.layers.{layer}.self_attn.q_norm.weight": "layers.self_attn.q_norm.scale",
        "model.layers.{layer}.self_attn.k_norm.weight": "layers.self_attn.k_norm.scale",
    }

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs, **options: Any):
        c = config

        def block(rngs: nnx.Rngs) -> Block:
            return Block(
                input_layernorm=RMSNorm("embed", c.hidden_size, eps=c.rms_norm_eps, rngs=rngs),
                self_attn=normalised_attention(c, rngs),
                post_attention_layernorm=RMSNorm("embed", c.hidden_size, eps=c.rms_norm_eps, rngs=rngs),
                mlp=GatedMLP(width=c.hidden_size, hidden=c.intermediate_size, std=c.initializer_range, rngs=rngs),
            )

        super().__init__(
            c,
            plans=(StackPlan((block,), c.num_hidden_layers, c.windows()),),
            frequencies=inverse_frequencies(c.head_dim, c.rope_theta),
            rngs=rngs,
            **options,
        )


def normalised_attention(config: Any, rngs: nnx.Rngs) -> GroupedQueryAttention:
    """Attention as every Qwen3 model has it: queries and keys are normalised, head by head."""
    c = config
    return GroupedQueryAttention(
        width=c.hidden_size,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        std=c.initializer_range,
        bias=c.attention_bias,
        output_bias=c.attention_bias,
        q_norm=RMSNorm("head_dim", c.head_dim, eps=c.rms_norm_eps, rngs=rngs),
        k_norm=RMSNorm("head_dim", c.head_dim, eps=c.rms_norm_eps, rngs=rngs),
        rngs=rngs,
    )
