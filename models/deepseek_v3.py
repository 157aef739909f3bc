"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437): latent attention, a few dense layers, then mixtures of experts."""

import functools
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.decoder import Decoder, DecoderConfig
from models.layers import GatedExperts, GatedMLP
from models.stacks import Block, plan_stacks
from omnijax.errors import UserError
from omnijax.hf_layout import Names
from omnijax.nn import rope
from omnijax.nn.attention import attention
from omnijax.nn.moe import MixtureOfExperts
from omnijax.nn.norms import RMSNorm
from omnijax.nn.projections import Axes, Linear
from omnijax.nn.rope import Rotation, YarnScaling
from omnijax.nn.router import Router, sigmoid_of_groups, sigmoid_shares
from omnijax.nn.spans import Span
from omnijax.sharding import constrain


@dataclass(frozen=True)
class DeepseekV3Config(DecoderConfig):
    """Fields are named as in the `config.json` of the published checkpoints.

    `head_dim` and `qk_head_dim` follow from the others: the width of a query's rotary part, and of the whole of it.
    """

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    num_key_value_heads: int = 128
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    qk_head_dim: int | None = None
    v_head_dim: int = 128
    attention_bias: bool = False
    rope_interleave: bool = True
    rope_scaling: YarnScaling | None = None
    first_k_dense_replace: int = 3
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5

    # The router is kept even by its correction; a balance loss is added where `RouterLoss.coefficient` says so.
    router_aux_loss_coef: ClassVar[float] = 0.0

    HF_TYPE: ClassVar[str] = "deepseek_v3"
    HF_CLASS: ClassVar[str] = "DeepseekV3ForCausalLM"
    HF_FIXED: ClassVar[dict[str, Any]] = {
        **DecoderConfig.HF_FIXED,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    ROPE_TYPES: ClassVar[dict[str, type]] = {"yarn": YarnScaling}

    def __post_init__(self) -> None:
        widths = {"head_dim": self.qk_rope_head_dim, "qk_head_dim": self.qk_nope_head_dim + self.qk_rope_head_dim}
        for name, width in widths.items():
            if getattr(self, name) not in (None, width):
                raise UserError(f"DeepseekV3Config.{name} = {getattr(self, name)} must be {width}, or left out")
            object.__setattr__(self, name, width)
        super().__post_init__()
        for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "moe_intermediate_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"DeepseekV3Config.{name} = {value} must be positive")
        group = self.n_routed_experts // max(self.n_group, 1)
        ranges = {
            "num_key_value_heads": (self.num_attention_heads, self.num_attention_heads),
            "first_k_dense_replace": (0, self.num_hidden_layers),
            "n_shared_experts": (1, self.n_routed_experts),
            "n_group": (1, self.n_routed_experts // 2),
            "topk_group": (1, self.n_group),
            "num_experts_per_tok": (1, group * self.topk_group),
        }
        for name, (least, most) in ranges.items():
            if not least <= getattr(self, name) <= most:
                allowed = f"{least}" if least == most else f"{least} to {most}"
                raise UserError(f"DeepseekV3Config.{name} = {getattr(self, name)} must be {allowed}, as the others are")
        if group * self.n_group != self.n_routed_experts:
            raise UserError(
                f"DeepseekV3Config: {self.n_routed_experts} experts do not make {self.n_group} groups of equally many"
            )

    def leaves_out(self, tensor: str) -> bool:
        """Whether a checkpoint's tensor is of the layers after the last, which predict further tokens in training."""
        layer = re.match(r"model\.layers\.(\d+)\.", tensor)
        return layer is not None and int(layer[1]) >= self.num_hidden_layers

    def attention_costs(self) -> tuple[tuple[int | None, int], ...]:
        pair = self.num_attention_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)
        return tuple((window, pair) for window in self.windows())

    def build(self, **options: Any) -> "DeepseekV3":
        """The model with fresh float32 parameters; `options` are those of `Decoder`."""
        return DeepseekV3(self, **options)


class LowRank(nnx.Module):
    """A linear map through a narrow vector, which is normalised."""

    def __init__(self, a_proj: Linear, a_layernorm: RMSNorm, b_proj: Linear):
        self.a_proj, self.a_layernorm, self.b_proj = a_proj, a_layernorm, b_proj

    def __call__(self, x: Float[Array, "B S E"]) -> Float[Array, "B S H D"]:
        return self.b_proj(self.a_layernorm(self.a_proj(x)))


class LatentAttention(nnx.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, sec. 2.1).

    Keys and values of all heads are made of one narrow vector per token, and so are the queries where `q_lora_rank`
    is given. Rotary positions have channels of their own; for keys these are one vector, which all heads share.
    """

    HF_NAMES: ClassVar[Names] = {
        f"model.layers.{{layer}}.self_attn.{theirs}": f"layers.self_attn.{ours}"
        for theirs, ours in {
            "q_proj.weight": "q_proj.kernel",
            "q_a_proj.weight": "q_proj.a_proj.kernel",
            "q_a_proj.bias": "q_proj.a_proj.bias",
            "q_a_layernorm.weight": "q_proj.a_layernorm.scale",
            "q_b_proj.weight": "q_proj.b_proj.kernel",
            "kv_a_proj_with_mqa.weight": "kv_a_proj.kernel",
            "kv_a_proj_with_mqa.bias": "kv_a_proj.bias",
            "kv_a_layernorm.weight": "kv_a_layernorm.scale",
            "kv_b_proj.weight": "kv_b_proj.kernel",
            "o_proj.weight": "o_proj.kernel",
            "o_proj.bias": "o_proj.bias",
        }.items()
    }

    def __init__(self, c: DeepseekV3Config, *, rngs: nnx.Rngs):
        def linear(inputs: Axes, outputs: Axes, bias: bool = False) -> Linear:
            return Linear(inputs, outputs, std=c.initializer_range, bias=bias, rngs=rngs)

        def norm(width: int) -> RMSNorm:
            return RMSNorm("latent", width, eps=1e-6, rngs=rngs)  # whatever `rms_norm_eps` is

        embed, heads, bias = ("embed", c.hidden_size), ("heads", c.num_attention_heads), c.attention_bias
        query = (heads, ("head_dim", c.qk_nope_head_dim + c.qk_rope_head_dim))
        if c.q_lora_rank is None:
            self.q_proj: Linear | LowRank = linear((embed,), query)
        else:
            self.q_proj = LowRank(
                a_proj=linear((embed,), (("latent_out", c.q_lora_rank),), bias),
                a_layernorm=norm(c.q_lora_rank),
                b_proj=linear((("latent", c.q_lora_rank),), query),
            )
        self.kv_a_proj = linear((embed,), (("latent_out", c.kv_lora_rank + c.qk_rope_head_dim),), bias)
        self.kv_a_layernorm = norm(c.kv_lora_rank)
        key_value = ("head_dim", c.qk_nope_head_dim + c.v_head_dim)
        self.kv_b_proj = linear((("latent", c.kv_lora_rank),), (heads, key_value))
        self.o_proj = linear((heads, ("head_dim", c.v_head_dim)), (embed,), bias)
        self.latent, self.plain, self.interleaved = c.kv_lora_rank, c.qk_nope_head_dim, c.rope_interleave
        self.scale = (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5
        if c.rope_scaling is not None:
            self.scale *= rope.magnitude(c.rope_scaling.factor, c.rope_scaling.mscale_all_dim or 0.0) ** 2

    def __call__(self, x: Float[Array, "B S E"], rotation: Rotation, span: Span) -> Float[Array, "B S E"]:
        def turn(x: Float[Array, "B S _ R"]) -> Float[Array, "B S _ R"]:
            return rope.rotate(rope.deinterleave(x) if self.interleaved else x, rotation)

        latent, k_turned = jnp.split(self.kv_a_proj(x), [self.latent], axis=-1)
        q = constrain(self.q_proj(x), "batch", "length", "act_heads", None)
        kv = constrain(self.kv_b_proj(self.kv_a_layernorm(latent)), "batch", "length", "act_heads", None)
        q_plain, q_turned = jnp.split(q, [self.plain], axis=-1)
        k_plain, v = jnp.split(kv, [self.plain], axis=-1)
        q_turned, k_turned = turn(q_turned), turn(k_turned[:, :, None])
        q = jnp.concatenate([q_plain, q_turned], axis=-1)
        k = jnp.concatenate([k_plain, jnp.broadcast_to(k_turned, q_turned.shape)], axis=-1)
        return self.o_proj(attention(q, k, v, span, scale=self.scale))


class DeepseekV3(Decoder):
    """Dense layers, then layers with experts; each token goes to some of these, and to the `shared` ones."""

    Config = DeepseekV3Config

    HF_NAMES: ClassVar[Names] = {
        **Decoder.HF_NAMES,
        **LatentAttention.HF_NAMES,
        **GatedMLP.HF_NAMES,
        "model.layers.{layer}.mlp.gate.weight": "layers.mlp.router.kernel",
        "model.layers.{layer}.mlp.gate.e_score_correction_bias": "layers.mlp.router.correction",
        **GatedExperts.HF_NAMES,
        "model.layers.{layer}.mlp.shared_experts.gate_proj.weight": "layers.mlp.shared.gate_proj.kernel",
        "model.layers.{layer}.mlp.shared_experts.up_proj.weight": "layers.mlp.shared.up_proj.kernel",
        "model.layers.{layer}.mlp.shared_experts.down_proj.weight": "layers.mlp.shared.down_proj.kernel",
    }
    HF_OTHER_NAMES: ClassVar[tuple[Names, ...]] = (
        {name: ours for name, ours in HF_NAMES.items() if "{expert}" not in name} | GatedExperts.HF_FUSED_NAMES,
    )

    def __init__(self, config: DeepseekV3Config, *, rngs: nnx.Rngs, **options: Any):
        c = config
        select = functools.partial(
            sigmoid_of_groups,
            top_k=c.num_experts_per_tok,
            groups=c.n_group,
            top_groups=c.topk_group,
            renormalise=c.norm_topk_prob,
            scale=c.routed_scaling_factor,
        )

        def block(is_dense: bool, rngs: nnx.Rngs) -> Block:
            sizes = {"width": c.hidden_size, "std": c.initializer_range, "rngs": rngs}
            if is_dense:
                mlp = GatedMLP(hidden=c.intermediate_size, **sizes)
            else:
                count, hidden = c.n_routed_experts, c.moe_intermediate_size
                mlp = MixtureOfExperts(
                    router=Router(experts=count, select=select, probabilities=sigmoid_shares, correction=True, **sizes),
                    experts=GatedExperts(experts=count, hidden=hidden, **sizes),
                    shared=GatedMLP(hidden=hidden * c.n_shared_experts, **sizes),
                )
            return Block(
                input_layernorm=RMSNorm("embed", c.hidden_size, eps=c.rms_norm_eps, rngs=rngs),
                self_attn=LatentAttention(c, rngs=rngs),
                post_attention_layernorm=RMSNorm("embed", c.hidden_size, eps=c.rms_norm_eps, rngs=rngs),
                mlp=mlp,
            )

        is_dense = [layer < c.first_k_dense_replace for layer in range(c.num_hidden_layers)]
        super().__init__(
            c,
            plans=plan_stacks(is_dense, lambda kind: functools.partial(block, kind), c.windows()),
            frequencies=rope.inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling),
            attention_factor=rope.attention_factor(c.rope_scaling),
            rngs=rngs,
            **options,
        )
