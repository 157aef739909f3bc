"""Qwen3 with mixtures of experts, such as Qwen3-30B-A3B (Qwen3 Technical Report, arXiv 2505.09388)."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx

from models.decoder import Decoder, SlidingWindowConfig
from models.layers import GatedExperts, GatedMLP
from models.qwen3 import Qwen3, normalised_attention
from models.stacks import Block, plan_stacks
from omnijax.errors import UserError
from omnijax.hf_layout import Names
from omnijax.nn.moe import MixtureOfExperts
from omnijax.nn.norms import RMSNorm
from omnijax.nn.rope import inverse_frequencies
from omnijax.nn.router import Router, softmax_then_top


@dataclass(frozen=True)
class Qwen3MoeConfig(SlidingWindowConfig):
    """Fields are named as in the `config.json` of the published checkpoints.

    A layer has experts if its number, counted from 1, is a multiple of `decoder_sparse_step`, and it is not, counted
    from 0, among `mlp_only_layers`.
    """

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    head_dim: int | None = None
    attention_bias: bool = False
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    router_aux_loss_coef: float = 0.001

    HF_TYPE: ClassVar[str] = "qwen3_moe"
    HF_CLASS: ClassVar[str] = "Qwen3MoeForCausalLM"
    HF_ALIASES: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.num_experts_per_tok <= self.num_experts:
            raise UserError(
                f"Qwen3MoeConfig.num_experts_per_tok = {self.num_experts_per_tok} must lie in 1..{self.num_experts}, "
                f"the number of experts"
            )
        for name in ("moe_intermediate_size", "decoder_sparse_step"):
            if getattr(self, name) < 1:
                raise UserError(f"Qwen3MoeConfig.{name} = {getattr(self, name)} must be positive")

    def has_experts(self) -> tuple[bool, ...]:
        """For every layer, whether it has experts."""
        layers = range(self.num_hidden_layers)
        return tuple((n + 1) % self.decoder_sparse_step == 0 and n not in self.mlp_only_layers for n in layers)

    def build(self, **options: Any) -> "Qwen3Moe":
        """The model with fresh float32 parameters; `options` are those of `Decoder`."""
        return Qwen3Moe(self, **options)


class Qwen3Moe(Decoder):
    """Qwen3's layers, most or all of them with experts in place of the feed-forward network."""

    Config = Qwen3MoeConfig

    HF_NAMES: ClassVar[Names] = {
        **Qwen3.HF_NAMES,
        "model.layers.{layer}.mlp.gate.weight": "layers.mlp.router.kernel",
        **GatedExperts.HF_NAMES,
    }
    HF_OTHER_NAMES: ClassVar[tuple[Names, ...]] = (
        {
            **Qwen3.HF_NAMES,
            "model.layers.{layer}.mlp.gate.weight": "layers.mlp.router.kernel",
            **GatedExperts.HF_FUSED_NAMES,
        },
    )

    def __init__(self, config: Qwen3MoeConfig, *, rngs: nnx.Rngs, **options: Any):
        c = config
        select = functools.partial(softmax_then_top, top_k=c.num_experts_per_tok, renormalise=c.norm_topk_prob)

        def block(has_experts: bool, rngs: nnx.Rngs) -> Block:
            sizes = {"width": c.hidden_size, "std": c.initializer_range, "rngs": rngs}
            if has_experts:
                mlp = MixtureOfExperts(
                    router=Router(experts=c.num_experts, select=select, **sizes),
                    experts=GatedExperts(hidden=c.moe_intermediate_size, experts=c.num_experts, **sizes),
                )
            else:
                mlp = GatedMLP(hidden=c.intermediate_size, **sizes)
            return Block(
                input_layernorm=RMSNorm("embed", c.hidden_size, eps=c.rms_norm_eps, rngs=rngs),
                self_attn=normalised_attention(c, rngs),
                post_attention_layernorm=RMSNorm("embed", c.hidden_size, eps=c.rms_norm_eps, rngs=rngs),
                mlp=mlp,
            )

        super().__init__(
            c,
            plans=plan_stacks(c.has_experts(), lambda kind: functools.partial(block, kind), c.windows()),
            frequencies=inverse_frequencies(c.head_dim, c.rope_theta),
            rngs=rngs,
            **options,
        )
