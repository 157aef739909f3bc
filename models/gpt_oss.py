"""gpt-oss (OpenAI 2025, arXiv 2508.10925): sinks in attention, a window in every other layer, biased experts."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.decoder import Decoder, DecoderConfig
from models.layers import GroupedQueryAttention
from models.stacks import Block, StackPlan
from omnijax.errors import UserError
from omnijax.hf_layout import Names, Part
from omnijax.nn.grouped import Rows
from omnijax.nn.moe import MixtureOfExperts
from omnijax.nn.norms import RMSNorm
from omnijax.nn.projections import param
from omnijax.nn.rope import YarnScaling, attention_factor, inverse_frequencies
from omnijax.nn.router import Router, top_then_softmax


@dataclass(frozen=True)
class GptOssConfig(DecoderConfig):
    """Fields are named as in the `config.json` of the published checkpoints.

    `layer_types` says which layers have the sliding window; None is every other one, from the first on.
    """

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int | None = 64
    rope_theta: float = 150000.0
    rope_scaling: YarnScaling | None = field(default=YarnScaling(32.0, 4096, truncate=False))
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    sliding_window: int = 128
    layer_types: tuple[str, ...] | None = None
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    router_aux_loss_coef: float = 0.001

    HF_TYPE: ClassVar[str] = "gpt_oss"
    HF_CLASS: ClassVar[str] = "GptOssForCausalLM"
    HF_ALIASES: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts"}
    ROPE_TYPES: ClassVar[dict[str, type]] = {"yarn": YarnScaling}

    def __post_init__(self) -> None:
        super().__post_init__()
        layers, kinds = self.num_hidden_layers, ("sliding_attention", "full_attention")
        if self.layer_types is None:
            object.__setattr__(self, "layer_types", tuple(kinds[layer % 2] for layer in range(layers)))
        if len(self.layer_types) != layers or set(self.layer_types) - set(kinds):
            raise UserError(f"GptOssConfig.layer_types must be {layers} times {' or '.join(kinds)}: {self.layer_types}")
        if not 0 < self.num_experts_per_tok <= self.num_local_experts:
            raise UserError(
                f"GptOssConfig.num_experts_per_tok = {self.num_experts_per_tok} must be 1 to {self.num_local_experts}, "
                f"all there are"
            )
        for name in ("sliding_window", "swiglu_limit"):
            if getattr(self, name) <= 0:
                raise UserError(f"GptOssConfig.{name} = {getattr(self, name)} must be positive")

    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)

    def build(self, **options: Any) -> "GptOss":
        """The model with fresh float32 parameters; `options` are those of `Decoder`."""
        return GptOss(self, **options)


@dataclass(frozen=True)
class ClampedSwiGLU:
    """`down((up + 1) * gate * sigmoid(alpha gate))` with biases; gate is at most `limit`, up between it and -it."""

    alpha: float
    limit: float

    def __call__(
        self, kernels: Mapping[str, Any], x: Float[Array, "n D"], weight: Float[Array, " n"], rows: Rows
    ) -> Float[Array, "n D"]:
        gate, up = jnp.unstack(rows.dot(x, kernels["gate_up_kernel"]) + rows.pick(kernels["gate_up_bias"]), axis=-1)
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        weight = weight[:, None].astype(x.dtype)
        hidden = (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate) * weight
        return rows.dot(hidden, kernels["down_kernel"]) + rows.pick(kernels["down_bias"]) * weight


class ClampedExperts(nnx.Module):
    """Experts of `ClampedSwiGLU`; gate and up are one kernel `[X, D, F, 2]`, as in the checkpoints."""

    HF_NAMES: ClassVar[Names] = {
        "model.layers.{layer}.mlp.experts.gate_up_proj": Part("layers.mlp.experts.gate_up_kernel", inputs_first=True),
        "model.layers.{layer}.mlp.experts.gate_up_proj_bias": "layers.mlp.experts.gate_up_bias",
        "model.layers.{layer}.mlp.experts.down_proj": Part("layers.mlp.experts.down_kernel", inputs_first=True),
        "model.layers.{layer}.mlp.experts.down_proj_bias": "layers.mlp.experts.down_bias",
    }

    def __init__(
        self, *, width: int, hidden: int, experts: int, std: float, alpha: float, limit: float, rngs: nnx.Rngs
    ):
        normal, zeros = nnx.initializers.normal(std), nnx.initializers.zeros
        count, embed, mlp, both = ("experts", experts), ("expert_embed", width), ("expert_mlp", hidden), (None, 2)
        self.gate_up_kernel = param(rngs, normal, (count, embed, mlp, both), inputs=1)
        self.gate_up_bias = param(rngs, zeros, (count, mlp, both), inputs=0)
        self.down_kernel = param(rngs, normal, (count, mlp, embed), inputs=1)
        self.down_bias = param(rngs, zeros, (count, embed), inputs=0)
        self.expert = ClampedSwiGLU(alpha, limit)


class GptOss(Decoder):
    """A decoder of identical layers: one stack, as a window is only a number."""

    Config = GptOssConfig

    HF_NAMES: ClassVar[Names] = {
        **Decoder.HF_NAMES,
        **GroupedQueryAttention.HF_NAMES,
        "model.layers.{layer}.self_attn.sinks": "layers.self_attn.sinks",
        "model.layers.{layer}.mlp.router.weight": "layers.mlp.router.kernel",
        "model.layers.{layer}.mlp.router.bias": "layers.mlp.router.bias",
        **ClampedExperts.HF_NAMES,
    }

    def __init__(self, config: GptOssConfig, *, rngs: nnx.Rngs, **options: Any):
        c = config
        select = functools.partial(top_then_softmax, top_k=c.num_experts_per_tok)

        def block(rngs: nnx.Rngs) -> Block:
            sizes = {"width": c.hidden_size, "experts": c.num_local_experts, "std": c.initializer_range, "rngs": rngs}
            return Block(
                input_layernorm=RMSNorm("embed", c.hidden_size, eps=c.rms_norm_eps, rngs=rngs),
                self_attn=attention_with_sinks(c, rngs),
                post_attention_layernorm=RMSNorm("embed", c.hidden_size, eps=c.rms_norm_eps, rngs=rngs),
                mlp=MixtureOfExperts(
                    router=Router(select=select, bias=True, **sizes),
                    experts=ClampedExperts(
                        hidden=c.intermediate_size, alpha=c.swiglu_alpha, limit=c.swiglu_limit, **sizes
                    ),
                ),
            )

        super().__init__(
            c,
            plans=(StackPlan((block,), c.num_hidden_layers, c.windows()),),
            frequencies=inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling),
            attention_factor=attention_factor(c.rope_scaling),
            rngs=rngs,
            **options,
        )


def attention_with_sinks(c: GptOssConfig, rngs: nnx.Rngs) -> GroupedQueryAttention:
    """Attention as every layer has it."""
    init = nnx.initializers.normal(c.initializer_range)
    return GroupedQueryAttention(
        width=c.hidden_size,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        std=c.initializer_range,
        bias=c.attention_bias,
        output_bias=c.attention_bias,
        sinks=param(rngs, init, (("heads", c.num_attention_heads),)),
        rngs=rngs,
    )
