"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): biased queries, keys and values; windows in the top layers."""

from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx

from models.decoder import Decoder, SlidingWindowConfig
from models.layers import GatedMLP, GroupedQueryAttention
from models.stacks import Block, StackPlan
from omnijax.nn.norms import RMSNorm
from omnijax.nn.rope import inverse_frequencies


@dataclass(frozen=True)
class Qwen2Config(SlidingWindowConfig):
    """Fields are named as in the `config.json` of the published checkpoints."""

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32

    HF_TYPE: ClassVar[str] = "qwen2"
    HF_CLASS: ClassVar[str] = "Qwen2ForCausalLM"

    def build(self, **options: Any) -> "Qwen2":
        """The model with fresh float32 parameters; `options` are those of `Decoder`."""
        return Qwen2(self, **options)


class Qwen2(Decoder):
    """A decoder of identical layers: one stack, as a window is only a number."""

    Config = Qwen2Config

    HF_NAMES: ClassVar[dict[str, str]] = {**Decoder.HF_NAMES, **GroupedQueryAttention.HF_NAMES, **GatedMLP.HF_NAMES}

    def __init__(self, config: Qwen2Config, *, rngs: nnx.Rngs, **options: Any):
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
                    bias=True,
                    rngs=rngs,
                ),
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
