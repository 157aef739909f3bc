"""Normalisation layers; statistics in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from omnijax.nn.projections import param


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * scale` over the last axis (Zhang & Sennrich 2019, eq. 4)."""

    def __init__(self, name: str, width: int, *, eps: float, rngs: nnx.Rngs):
        self.scale = param(rngs, nnx.initializers.ones, ((name, width),))
        self.eps = eps

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * self.scale[...]


class LayerNorm(nnx.Module):
    """`(x - mean(x)) / sqrt(var(x) + eps) * scale + bias` over the last axis (Ba et al. 2016, eq. 4)."""

    def __init__(self, name: str, width: int, *, eps: float, rngs: nnx.Rngs):
        self.scale = param(rngs, nnx.initializers.ones, ((name, width),))
        self.bias = param(rngs, nnx.initializers.zeros, ((name, width),))
        self.eps = eps

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * self.scale[...] + self.bias[...]
