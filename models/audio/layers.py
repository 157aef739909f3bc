"""What the audio towers share: convolutions over frames, then pre-norm layers as Whisper has them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from models.audio.config import AudioConfig
from models.towers import MLP, TowerStack, runs
from omnijax.hf_layout import Names
from omnijax.nn import spans
from omnijax.nn.attention import attention
from omnijax.nn.norms import LayerNorm
from omnijax.nn.projections import Linear, param
from omnijax.nn.remat import Remat, rematerialise
from omnijax.sharding import constrain

EPS = 1e-5


class Convolution(nnx.Module):
    """A convolution inside every unit: 3 wide along each of its axes, with a border of one zero, then an exact GELU.

    The kernel is `[outputs, inputs, 3, ...]`, as checkpoints have it. It is a product with windows of the input: that
    leaves units where they are on a mesh, where XLA gathers the units for a convolution's own gradient.
    """

    def __init__(self, inputs: int, outputs: int, axes: int, *, stride: int, std: float, rngs: nnx.Rngs):
        shape = (("embed", outputs), (None, inputs), *((None, 3),) * axes)
        self.kernel = param(rngs, nnx.initializers.normal(std), shape)
        self.bias = param(rngs, nnx.initializers.zeros, (("embed", outputs),))
        self.stride = stride

    def __call__(self, x: Float[Array, "B N *size C"]) -> Float[Array, "B N *smaller E"]:
        kernel = self.kernel[...]
        x = x.astype(kernel.dtype)
        for axis in range(2, kernel.ndim):
            x = _windows(x, axis, self.stride)
        x = x.reshape(*x.shape[: kernel.ndim], -1) @ kernel.reshape(len(kernel), -1).T
        return constrain(exact_gelu(x + self.bias[...]), *unit_axes(x.ndim))


def _windows(x: Float[Array, "..."], axis: int, stride: int) -> Float[Array, "..."]:
    """The neighbours -1, 0 and 1 along `axis` of every `stride`th element, along a new last axis."""
    padded = jnp.pad(x, [(1, 1) if each == axis else (0, 0) for each in range(x.ndim)])
    last = x.shape[axis] - 1
    shifted = (jax.lax.slice_in_dim(padded, k, k + last + 1, stride, axis) for k in range(3))
    return jnp.stack(list(shifted), axis=-1)


class BiasedAttention(nnx.Module):
    """Attention without rotation; queries, values and the output have a bias, keys where `k_bias` says so."""

    def __init__(self, *, width: int, num_heads: int, k_bias: bool, std: float, rngs: nnx.Rngs):
        embed, heads, dim = ("embed", width), ("heads", num_heads), ("head_dim", width // num_heads)
        self.q_proj = Linear((embed,), (heads, dim), std=std, bias=True, rngs=rngs)
        self.k_proj = Linear((embed,), (heads, dim), std=std, bias=k_bias, rngs=rngs)
        self.v_proj = Linear((embed,), (heads, dim), std=std, bias=True, rngs=rngs)
        self.out_proj = Linear((heads, dim), (embed,), std=std, bias=True, rngs=rngs)
        self.scale = (width // num_heads) ** -0.5

    def __call__(self, x: Float[Array, "B M E"], span: spans.Span) -> Float[Array, "B M E"]:
        q, k, v = (
            constrain(each(x), "batch", "length", "act_heads", None) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(attention(q, k, v, span, scale=self.scale))


class EncoderBlock(nnx.Module):
    """A pre-norm residual layer (Radford et al. 2022, arXiv 2212.04356, sec. 2.2)."""

    def __init__(self, config: AudioConfig, *, k_bias: bool, std: float, rngs: nnx.Rngs):
        width, heads, hidden = config.d_model, config.encoder_attention_heads, config.encoder_ffn_dim
        self.self_attn_layer_norm = LayerNorm("embed", width, eps=EPS, rngs=rngs)
        self.self_attn = BiasedAttention(width=width, num_heads=heads, k_bias=k_bias, std=std, rngs=rngs)
        self.final_layer_norm = LayerNorm("embed", width, eps=EPS, rngs=rngs)
        self.mlp = MLP(width=width, hidden=hidden, activation=exact_gelu, std=std, rngs=rngs)

    def __call__(self, x: Float[Array, "B M E"], span: spans.Span) -> Float[Array, "B M E"]:
        x = constrain(x + self.self_attn(self.self_attn_layer_norm(x), span), "batch", "length", "act_embed")
        return constrain(x + self.mlp(self.final_layer_norm(x)), "batch", "length", "act_embed")


def exact_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU by the error function."""
    return jax.nn.gelu(x, approximate=False)


def encoder_stack(config: AudioConfig, *, k_bias: bool, std: float, remat: Remat, rngs: nnx.Rngs) -> TowerStack:
    """The layers of a tower, for `encode`."""

    def block(rngs: nnx.Rngs) -> EncoderBlock:
        return EncoderBlock(config, k_bias=k_bias, std=std, rngs=rngs)

    return TowerStack(block, [0] * config.encoder_layers, remat=remat, rngs=rngs)


def encode(stack: TowerStack, x: Float[Array, "B M E"], span: spans.Span) -> Float[Array, "B M E"]:
    """The layers of a stack, scanned, all within one span."""
    graphdef, state = nnx.split(stack.blocks[0])

    def layer(x, state):
        return nnx.merge(graphdef, state)(x, span), None

    return jax.lax.scan(rematerialise(layer, stack.remat), x, state)[0]


def unit_axes(rank: int) -> tuple[str | None, ...]:
    """The axes of an activation `[B, N, *unit]`: units are split over devices, and none is cut."""
    return ("batch", "length", *(None,) * (rank - 2))


def zero_padding(x: Float[Array, "B N T C"], valid: Int[Array, "B N"]) -> Float[Array, "B N T C"]:
    """`x` with zeros behind the first `valid` frames of each unit."""
    return jnp.where(inside(valid, x.shape[2])[..., None], x, 0)


def inside(valid: Int[Array, "B N"], size: int) -> Bool[Array, "B N T"]:
    """Which of the `size` places of each unit are among its first `valid`."""
    return jnp.arange(size) < valid[..., None]


def unit_spans(first: Bool[Array, "B N"], real: Bool[Array, "B N T"]) -> spans.Span:
    """Every real place sees the real ones of its run of units, which begins with the unit where `first` is set.

    Real places stand at the start of each unit, and only the last unit of a run may have others behind them.
    """
    starts = first[..., None] & (jnp.arange(real.shape[2]) == 0)
    rows = (real.shape[0], -1)
    return runs((starts & real).reshape(rows), real.reshape(rows))


def joined(x: Float[Array, "B N T E"]) -> Float[Array, "B M E"]:
    """The places of all units in one row."""
    return constrain(x.reshape(x.shape[0], -1, x.shape[-1]), "batch", "length", "act_embed")


def sinusoids(length: int, width: int) -> Float[np.ndarray, "T E"]:
    """Sines, then cosines, of a place (Vaswani et al. 2017, sec. 3.5) at wavelengths from 2 pi to 2 pi 10000."""
    step = np.log(10000) / (width // 2 - 1)
    phase = np.arange(length, dtype=np.float32)[:, None] * np.exp(-step * np.arange(width // 2)).astype(np.float32)
    return np.concatenate([np.sin(phase), np.cos(phase)], axis=1)


def layer_names(prefix: str) -> Names:
    """Hugging Face names of the layers."""
    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")
    theirs = named(f"{prefix}layers.{{layer}}.", (*attention, "fc1", "fc2"), "kernel")
    theirs |= named(f"{prefix}layers.{{layer}}.", ("self_attn_layer_norm", "final_layer_norm"), "scale")
    return {name: f"layers.{'mlp.' if path.startswith('fc') else ''}{path}" for name, path in theirs.items()}


def named(prefix: str, modules: Sequence[str], weight: str) -> dict[str, str]:
    """Hugging Face names of modules that have the same name here; `weight` is our name of their weight."""
    return {
        f"{prefix}{module}.{kind}": f"{module}.{leaf}"
        for module in modules
        for kind, leaf in (("weight", weight), ("bias", "bias"))
    }
