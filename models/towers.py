"""What the encoders of Qwen's vision families share: patches in, blocks of bidirectional attention, patches merged."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from omnijax.hf_layout import Names
from omnijax.nn import spans
from omnijax.nn.attention import attention
from omnijax.nn.projections import Linear, param
from omnijax.nn.remat import Remat, rematerialise
from omnijax.nn.rope import Rotation, inverse_frequencies, rotate
from omnijax.sharding import constrain


class PatchEmbedding(nnx.Module):
    """A linear map of whole patches: a convolution whose stride is its kernel.

    The kernel is `[embed, channels, time, height, width]`, as checkpoints have it.
    """

    def __init__(self, shape: Sequence[int], width: int, *, std: float, rngs: nnx.Rngs, bias: bool = False):
        axes = (("embed", width), *((None, size) for size in shape))
        self.kernel = param(rngs, nnx.initializers.normal(std), axes)
        self.bias = param(rngs, nnx.initializers.zeros, (("embed", width),)) if bias else None

    def __call__(self, patches: Float[Array, "B N P"]) -> Float[Array, "B N E"]:
        kernel = self.kernel[...]
        x = jnp.einsum("bnp,ep->bne", patches.astype(kernel.dtype), kernel.reshape(len(kernel), -1))
        return constrain(x if self.bias is None else x + self.bias[...], "batch", "length", "act_embed")


class FusedAttention(nnx.Module):
    """Attention, with rotary positions if any; `[embed, 3, heads, head_dim]` makes queries, keys and values."""

    def __init__(self, *, width: int, num_heads: int, std: float, rngs: nnx.Rngs):
        embed, three = ("embed", width), (None, 3)
        heads, dim = ("heads", num_heads), ("head_dim", width // num_heads)
        self.qkv = Linear((embed,), (three, heads, dim), std=std, bias=True, rngs=rngs)
        self.proj = Linear((heads, dim), (embed,), std=std, bias=True, rngs=rngs)
        self.scale = (width // num_heads) ** -0.5

    def __call__(self, x: Float[Array, "B N E"], rotation: Rotation | None, span: spans.Span) -> Float[Array, "B N E"]:
        qkv = constrain(self.qkv(x), "batch", "length", None, "act_heads", None)
        q, k, v = jnp.unstack(qkv, axis=2)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return self.proj(attention(q, k, v, span, scale=self.scale))


class MLP(nnx.Module):
    """`fc2(activation(fc1(x)))`."""

    def __init__(self, *, width: int, hidden: int, activation: Callable[[Array], Array], std: float, rngs: nnx.Rngs):
        embed, mlp = ("embed", width), ("mlp", hidden)
        self.fc1 = Linear((embed,), (mlp,), std=std, bias=True, rngs=rngs)
        self.fc2 = Linear((mlp,), (embed,), std=std, bias=True, rngs=rngs)
        self.activation = activation

    def __call__(self, x: Float[Array, "B N E"]) -> Float[Array, "B N E"]:
        return self.fc2(constrain(self.activation(self.fc1(x)), "batch", "length", "act_mlp"))


class TowerBlock(nnx.Module):
    """A pre-norm residual layer."""

    HF_NAMES: ClassVar[Names] = {
        f"visual.blocks.{{layer}}.attn.{name}.{theirs}": f"layers.attn.{name}.{ours}"
        for name in ("qkv", "proj")
        for theirs, ours in (("weight", "kernel"), ("bias", "bias"))
    }

    def __init__(self, *, norm1: nnx.Module, attn: nnx.Module, norm2: nnx.Module, mlp: nnx.Module):
        self.norm1, self.attn, self.norm2, self.mlp = norm1, attn, norm2, mlp

    def __call__(self, x: Float[Array, "B N E"], rotation: Rotation | None, span: spans.Span) -> Float[Array, "B N E"]:
        x = constrain(x + self.attn(self.norm1(x), rotation, span), "batch", "length", "act_embed")
        return constrain(x + self.mlp(self.norm2(x)), "batch", "length", "act_embed")


def stacked(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> nnx.Module:
    """`count` modules of one kind as one, whose parameters have a leading axis `layers`."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: None, "axes": "layers"})
    def make_all(rngs: nnx.Rngs) -> nnx.Module:
        return make(rngs)

    return make_all(rngs)


class TowerStack(nnx.Module):
    """Layers of one kind, scanned. Layer i attends within the span numbered `choices[i]` of those it is given."""

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module], choices: Sequence[int], *, remat: Remat, rngs: nnx.Rngs):
        self.blocks = nnx.List([stacked(make, len(choices), rngs)])
        self.choices, self.remat = tuple(choices), remat

    def __call__(
        self, x: Float[Array, "B N E"], rotation: Rotation | None, choices: Sequence[spans.Span]
    ) -> Float[Array, "B N E"]:
        graphdef, state = nnx.split(self.blocks[0])
        starts, ends = (jnp.stack(each) for each in zip(*choices, strict=True))

        def layer(x, scanned):
            state, choice = scanned
            # What differs between layers only by a number is scanned, so that they share one program.
            return nnx.merge(graphdef, state)(x, rotation, (starts[choice], ends[choice])), None

        numbers = jnp.asarray(self.choices, jnp.int32)
        return jax.lax.scan(rematerialise(layer, self.remat), x, (state, numbers))[0]


class PatchMerger(nnx.Module):
    """Each run of `merged` patches becomes one token: normalised, joined, and mapped by an MLP with an exact GELU.

    `norm` is as wide as a patch, or, where `joined_first`, as the joined ones. `linear_1` and `linear_2` are `mlp.0`
    and `mlp.2` of the checkpoints.
    """

    HF_NAMES: ClassVar[Names] = {
        f"visual.merger.mlp.{number}.{theirs}": f"merger.{name}.{ours}"
        for number, name in ((0, "linear_1"), (2, "linear_2"))
        for theirs, ours in (("weight", "kernel"), ("bias", "bias"))
    }

    def __init__(
        self,
        norm: nnx.Module,
        *,
        merged: int,
        width: int,
        out: int,
        std: float,
        rngs: nnx.Rngs,
        joined_first: bool = False,
    ):
        hidden = ("mlp", merged * width)
        self.ln_q, self.merged, self.joined_first = norm, merged, joined_first
        self.linear_1 = Linear(((None, merged), ("embed", width)), (hidden,), std=std, bias=True, rngs=rngs)
        self.linear_2 = Linear((hidden,), (("embed", out),), std=std, bias=True, rngs=rngs)

    def __call__(self, x: Float[Array, "B N E"]) -> Float[Array, "B M out"]:
        joined = (x.shape[0], -1, self.merged, x.shape[-1])
        if self.joined_first:
            x = self.ln_q(x.reshape(x.shape[0], -1, self.merged * x.shape[-1])).reshape(joined)
        else:
            x = self.ln_q(x).reshape(joined)
        hidden = jax.nn.gelu(self.linear_1(x), approximate=False)
        return constrain(self.linear_2(constrain(hidden, "batch", "length", "act_mlp")), "batch", "length", "act_embed")


def tanh_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU by the hyperbolic tangent (Hendrycks & Gimpel 2016, sec. 2)."""
    return jax.nn.gelu(x, approximate=True)


def exact_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU by the error function (the same)."""
    return jax.nn.gelu(x, approximate=False)


def runs(first: Bool[Array, "B N"], real: Bool[Array, "B N"]) -> spans.Span:
    """Every unit sees the run it stands in, which begins where `first` is set; padding sees nothing."""
    # Whole rows on every device, as for every span: the sum over a split row would be a chain of exchanges.
    first, real = (constrain(x, "batch", "attention_length") for x in (first, real))
    return spans.document(jnp.where(real, jnp.cumsum(first, axis=1, dtype=jnp.int32), 0))


def frames(positions: Int[Array, "B N 3"], real: Bool[Array, "B N"], side: int | None = None) -> spans.Span:
    """Every patch sees its frame, or its window of `side` x `side` patches; `positions` are (time, height, width).

    A frame, or a window, begins at its corner: units stand in the order that puts the corner first.
    """
    place = positions[..., 1:]
    return runs(real & ((place if side is None else place % side) == 0).all(-1), real)


def axial_rotation(positions: Int[Array, "B N 3"], head_dim: int, theta: float) -> Rotation:
    """Half of the channel pairs turn by the height, the other half by the width (Qwen2-VL, arXiv 2409.12191, 2.1)."""
    frequencies = np.asarray(inverse_frequencies(head_dim // 2, theta))
    phase = positions[..., 1:, None].astype(jnp.float32) * frequencies
    phase = phase.reshape(*positions.shape[:2], -1)
    return jnp.cos(phase), jnp.sin(phase)
