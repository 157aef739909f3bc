"""Llama 2 and 3 (Touvron et al. 2023, arXiv 2307.09288; Llama Team 2024, arXiv 2407.21783)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx

from models.decoder import Decoder, DecoderConfig
from models.layers import GatedMLP, GroupedQueryAttention
from models.stacks import Block, StackPlan
from omnijax.nn.norms import RMSNorm
from omnijax.nn.rope import Llama3Scaling, inverse_frequencies


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """Fields are named as in the `config.json` of the published checkpoints."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_scaling: Llama3Scaling | None = None

    HF_TYPE: ClassVar[str] = "llama"
    HF_CLASS: ClassVar[str] = "LlamaForCausalLM"
    ROPE_TYPES: ClassVar[dict[str, type]] = {"llama3": Llama3Scaling}

    def build(self, **options: Any) -> "Llama":
        """The model with fresh float32 parameters; `options` are those of `Decoder`."""
        return Llama(self, **options)


class Llama(Decoder):
    """A decoder of identical layers: one stack."""

    Config = LlamaConfig

    HF_NAMES: ClassVar[dict[str, str]] = {**Decoder.HF_NAMES, **GroupedQueryAttention.HF_NAMES, **GatedMLP.HF_NAMES}

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, **options: Any):
        c = config

        def block(rngs: nnx.Rngs) -> Block:
            return Block(
                input_layernorm=RMSNorm("embed", c.hidden_size, eps=c.rms_norm_eps, rngs=rngs),
                self_attn=GroupedQueryAttention(
                    width=c.hidden_size,
                    num_heads=c.num_attention_heads,
                    num_kv_heads=c.num_key_value_heads,
                    head_dim=c.head_dim,
                    std=c.initializer_range,
                    bias=c.attention_bias,
                    output_bias=c.attention_bias,
                    rngs=rngs,
                ),
                post_attention_layernorm=RMSNorm("embed", c.hidden_size, eps=c.rms_norm_eps, rngs=rngs),
                mlp=GatedMLP(
                    width=c.hidden_size,
                    hidden=c.intermediate_size,
                    std=c.initializer_range,
                    bias=c.mlp_bias,
                    rngs=rngs,
                ),
            )

        super().__init__(
            c,
            plans=(StackPlan((block,), c.num_hidden_layers, c.windows()),),
            frequencies=inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling),
            rngs=rngs,
            **options,
        )
