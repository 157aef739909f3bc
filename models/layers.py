"""Layers that several families share: grouped-query attention, gated feed-forward networks and experts."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from omnijax.hf_layout import Names, Part
from omnijax.nn.attention import attention
from omnijax.nn.grouped import Rows
from omnijax.nn.projections import Linear, param
from omnijax.nn.rope import Rotation, rotate
from omnijax.nn.spans import Span
from omnijax.sharding import constrain


class GroupedQueryAttention(nnx.Module):
    """Attention with rotary positions, `num_heads` queries over `num_kv_heads` keys (Ainslie et al. 2023).

    `q_norm` and `k_norm`, where a family has them, act on each head before the rotation; `sinks` holds one logit
    without a value for each query head.
    """

    HF_NAMES: ClassVar[dict[str, str]] = {
        f"model.layers.{{layer}}.self_attn.{name}.{theirs}": f"layers.self_attn.{name}.{ours}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        for theirs, ours in (("weight", "kernel"), ("bias", "bias"))
    }

    def __init__(
        self,
        *,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        std: float,
        rngs: nnx.Rngs,
        bias: bool = False,
        output_bias: bool = False,
        q_norm: nnx.Module | None = None,
        k_norm: nnx.Module | None = None,
        sinks: nnx.Param | None = None,
    ):
        embed, dim = ("embed", width), ("head_dim", head_dim)
        heads, kv_heads = ("heads", num_heads), ("kv_heads", num_kv_heads)
        self.q_proj = Linear((embed,), (heads, dim), std=std, bias=bias, rngs=rngs)
        self.k_proj = Linear((embed,), (kv_heads, dim), std=std, bias=bias, rngs=rngs)
        self.v_proj = Linear((embed,), (kv_heads, dim), std=std, bias=bias, rngs=rngs)
        self.o_proj = Linear((heads, dim), (embed,), std=std, bias=output_bias, rngs=rngs)
        self.q_norm, self.k_norm, self.sinks = q_norm, k_norm, sinks
        self.scale = head_dim**-0.5

    def __call__(self, x: Float[Array, "B S E"], rotation: Rotation, span: Span) -> Float[Array, "B S E"]:
        q = constrain(self.q_proj(x), "batch", "length", "act_heads", None)
        k = constrain(self.k_proj(x), "batch", "length", "act_kv_heads", None)
        v = constrain(self.v_proj(x), "batch", "length", "act_kv_heads", None)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        sinks = None if self.sinks is None else self.sinks[...]
        out = attention(rotate(q, rotation), rotate(k, rotation), v, span, scale=self.scale, sinks=sinks)
        return self.o_proj(out)


class GatedMLP(nnx.Module):
    """SwiGLU (Shazeer 2020): `down(silu(gate(x)) * up(x))`."""

    HF_NAMES: ClassVar[dict[str, str]] = {
        f"model.layers.{{layer}}.mlp.{name}.{theirs}": f"layers.mlp.{name}.{ours}"
        for name in ("gate_proj", "up_proj", "down_proj")
        for theirs, ours in (("weight", "kernel"), ("bias", "bias"))
    }

    def __init__(self, *, width: int, hidden: int, std: float, rngs: nnx.Rngs, bias: bool = False):
        embed, mlp = ("embed", width), ("mlp", hidden)
        self.gate_proj = Linear((embed,), (mlp,), std=std, bias=bias, rngs=rngs)
        self.up_proj = Linear((embed,), (mlp,), std=std, bias=bias, rngs=rngs)
        self.down_proj = Linear((mlp,), (embed,), std=std, bias=bias, rngs=rngs)

    def __call__(self, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        hidden = jax.nn.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(constrain(hidden, "batch", "length", "act_mlp"))


class GatedExperts(nnx.Module):
    """SwiGLU experts (Shazeer 2020): `down(silu(gate(x)) * up(x))`, gate and up as one kernel `[X, D, 2, F]`.

    Checkpoints keep a tensor for each expert (`HF_NAMES`) or one for all (`HF_FUSED_NAMES`).
    """

    HF_NAMES: ClassVar[Names] = {
        f"model.layers.{{layer}}.mlp.experts.{{expert}}.{name}.weight": ours
        for name, ours in (
            ("gate_proj", Part("layers.mlp.experts.gate_up_kernel", index=0)),
            ("up_proj", Part("layers.mlp.experts.gate_up_kernel", index=1)),
            ("down_proj", "layers.mlp.experts.down_kernel"),
        )
    }
    HF_FUSED_NAMES: ClassVar[Names] = {
        "model.layers.{layer}.mlp.experts.gate_up_proj": "layers.mlp.experts.gate_up_kernel",
        "model.layers.{layer}.mlp.experts.down_proj": "layers.mlp.experts.down_kernel",
    }

    def __init__(self, *, width: int, hidden: int, experts: int, std: float, rngs: nnx.Rngs):
        init = nnx.initializers.normal(std)
        count, embed, mlp = ("experts", experts), ("expert_embed", width), ("expert_mlp", hidden)
        self.gate_up_kernel = param(rngs, init, (count, embed, (None, 2), mlp), inputs=1)
        self.down_kernel = param(rngs, init, (count, mlp, embed), inputs=1)

    @staticmethod
    def expert(kernels: Mapping[str, Any], x: Float[Array, "n D"], weight: Float[Array, " n"], rows: Rows) -> Array:
        """What experts make of rows; the weight comes before the last product, which spares its gradient a product."""
        gate, up = jnp.unstack(rows.dot(x, kernels["gate_up_kernel"]), axis=1)
        hidden = jax.nn.silu(gate) * up * weight[:, None].astype(x.dtype)
        return rows.dot(hidden, kernels["down_kernel"])
