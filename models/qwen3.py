"""Qwen3, dense (Qwen3 Technical Report, arXiv 2505.09388): grouped-query attention with normalised queries and keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx

from models import hf_config
from models.decoder import Block, Decoder, StackPlan
from models.layers import GatedMLP, GroupedQueryAttention
from omnijax.errors import UserError
from omnijax.nn.norms import RMSNorm
from omnijax.nn.remat import Remat
from omnijax.nn.rope import inverse_frequencies
from omnijax.objectives import TextLoss


@dataclass(frozen=True)
class Qwen3Config:
    """Fields are named as in the `config.json` of the published checkpoints."""

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None
    initializer_range: float = 0.02

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], name: str = "config.json") -> "Qwen3Config":
        """Read a `config.json`; raises `UserError` for what Qwen3 does not have."""
        return hf_config.read(cls, values, fixed={"hidden_act": "silu", "attention_dropout": 0.0}, name=name)

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"Qwen3Config: {self.num_attention_heads} attention heads are not a multiple of "
                f"{self.num_key_value_heads} key/value heads; change one of them"
            )
        if self.head_dim % 2:
            raise UserError(f"Qwen3Config.head_dim = {self.head_dim} is odd; rotary positions turn pairs of channels")
        if self.use_sliding_window and not self.sliding_window:
            raise UserError("Qwen3Config.use_sliding_window needs sliding_window, a number of tokens")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise UserError(f"Qwen3Config: {len(self.layer_types)} layer_types for {self.num_hidden_layers} layers")

    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of every layer: as `layer_types` says, else for the layers from `max_window_layers` on."""
        if not self.use_sliding_window:
            return (None,) * self.num_hidden_layers
        kinds = self.layer_types or tuple(
            "sliding_attention" if layer >= self.max_window_layers else "full_attention"
            for layer in range(self.num_hidden_layers)
        )
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in kinds)

    def attention_costs(self) -> tuple[tuple[int | None, int], ...]:
        """Per layer: its window, and the multiply-adds of one query seeing one key (scores and values)."""
        return tuple((window, self.num_attention_heads * 2 * self.head_dim) for window in self.windows())

    def build(self, *, rngs: nnx.Rngs, remat: Remat = "none", loss: TextLoss | None = None) -> "Qwen3":
        """The model with fresh float32 parameters."""
        return Qwen3(self, rngs=rngs, remat=remat, loss=loss or TextLoss())


class Qwen3(Decoder):
    """A decoder of identical layers: one stack."""

    Config = Qwen3Config

    HF_NAMES: ClassVar[dict[str, str]] = {
        "model.embed_tokens.weight": "embed_tokens.embedding",
        "model.layers.{layer}.input_layernorm.weight": "layers.input_layernorm.scale",
        "model.layers.{layer}.self_attn.q_proj.weight": "layers.self_attn.q_proj.kernel",
        "model.layers.{layer}.self_attn.q_proj.bias": "layers.self_attn.q_proj.bias",
        "model.layers.{layer}.self_attn.k_proj.weight": "layers.self_attn.k_proj.kernel",
        "model.layers.{layer}.self_attn.k_proj.bias": "layers.self_attn.k_proj.bias",
        "model.layers.{layer}.self_attn.v_proj.weight": "layers.self_attn.v_proj.kernel",
        "model.layers.{layer}.self_attn.v_proj.bias": "layers.self_attn.v_proj.bias",
        "model.layers.{layer}.self_attn.o_proj.weight": "layers.self_attn.o_proj.kernel",
        "model.layers.{layer}.self_attn.o_proj.bias": "layers.self_attn.o_proj.bias",
        "model.layers.{layer}.self_attn.q_norm.weight": "layers.self_attn.q_norm.scale",
        "model.layers.{layer}.self_attn.k_norm.weight": "layers.self_attn.k_norm.scale",
        "model.layers.{layer}.post_attention_layernorm.weight": "layers.post_attention_layernorm.scale",
        "model.layers.{layer}.mlp.gate_proj.weight": "layers.mlp.gate_proj.kernel",
        "model.layers.{layer}.mlp.up_proj.weight": "layers.mlp.up_proj.kernel",
        "model.layers.{layer}.mlp.down_proj.weight": "layers.mlp.down_proj.kernel",
        "model.norm.weight": "norm.scale",
        "lm_head.weight": "lm_head.embedding",
    }

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs, remat: Remat, loss: TextLoss):
        c = config

        def block(rngs: nnx.Rngs) -> Block:
            def norm(name: str, width: int) -> RMSNorm:
                return RMSNorm(name, width, eps=c.rms_norm_eps, rngs=rngs)

            return Block(
                input_layernorm=norm("embed", c.hidden_size),
                self_attn=GroupedQueryAttention(
                    width=c.hidden_size,
                    num_heads=c.num_attention_heads,
                    num_kv_heads=c.num_key_value_heads,
                    head_dim=c.head_dim,
                    std=c.initializer_range,
                    bias=c.attention_bias,
                    output_bias=c.attention_bias,
                    q_norm=norm("head_dim", c.head_dim),
                    k_norm=norm("head_dim", c.head_dim),
                    rngs=rngs,
                ),
                post_attention_layernorm=norm("embed", c.hidden_size),
                mlp=GatedMLP(width=c.hidden_size, hidden=c.intermediate_size, std=c.initializer_range, rngs=rngs),
            )

        super().__init__(
            vocab_size=c.vocab_size,
            width=c.hidden_size,
            plans=(StackPlan((block,), c.num_hidden_layers, c.windows()),),
            frequencies=inverse_frequencies(c.head_dim, c.rope_theta),
            norm_eps=c.rms_norm_eps,
            tie_word_embeddings=c.tie_word_embeddings,
            std=c.initializer_range,
            remat=remat,
            loss=loss,
            rngs=rngs,
        )
        self.config = config
