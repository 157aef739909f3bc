"""The decoder every language family is made of: a tuple of stacks, each scanned over its layers.

A stack is `(pattern, repeats)`: its layers repeat a short pattern of blocks. One scan step runs one period, so the
program is as long as the pattern, not as the model. Layers are numbered through all stacks, from 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from omnijax.batch import Batch
from omnijax.nn import rope, spans
from omnijax.nn.norms import RMSNorm
from omnijax.nn.projections import Embedding
from omnijax.nn.remat import Remat, rematerialise
from omnijax.objectives import Outputs, TextLoss
from omnijax.sharding import constrain

MakeBlock = Callable[[nnx.Rngs], nnx.Module]


@dataclass(frozen=True)
class StackPlan:
    """`repeats` periods of `pattern`; `windows` holds the sliding window of every layer, or None for no limit."""

    pattern: tuple[MakeBlock, ...]
    repeats: int
    windows: tuple[int | None, ...]

    def __post_init__(self) -> None:
        if len(self.windows) != self.repeats * len(self.pattern):
            raise ValueError(f"{len(self.windows)} windows for {self.repeats} x {len(self.pattern)} layers")


class Block(nnx.Module):
    """A pre-norm residual layer: attention, then a feed-forward network."""

    def __init__(self, *, input_layernorm, self_attn, post_attention_layernorm, mlp):
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp

    def __call__(self, x: Float[Array, "B S E"], rotation: rope.Rotation, span: spans.Span) -> Float[Array, "B S E"]:
        x = x + self.self_attn(self.input_layernorm(x), rotation, span)
        x = constrain(x, "batch", "length", "act_embed")
        x = x + self.mlp(self.post_attention_layernorm(x))
        return constrain(x, "batch", "length", "act_embed")


class Stack(nnx.Module):
    """Layers whose parameters are stacked along a leading `layers` axis, one stack of arrays per pattern position."""

    def __init__(self, plan: StackPlan, *, remat: Remat, rngs: nnx.Rngs):
        self.blocks = nnx.List([_stacked(make, plan.repeats, rngs) for make in plan.pattern])
        self.repeats, self.windows, self.remat = plan.repeats, plan.windows, remat

    def __call__(self, x: Float[Array, "B S E"], rotation: rope.Rotation, span: spans.Span) -> Float[Array, "B S E"]:
        graphdefs, states = zip(*(nnx.split(block) for block in self.blocks), strict=True)
        windows = self._windows(x.shape[1])

        def period(x, scanned):
            states, windows = scanned
            for index, (graphdef, state) in enumerate(zip(graphdefs, states, strict=True)):
                limited = span if windows is None else spans.window(span, windows[index])
                x = nnx.merge(graphdef, state)(x, rotation, limited)
            return x, None

        body = rematerialise(period, self.remat)
        return jax.lax.scan(body, x, (states, windows), length=self.repeats)[0]

    def _windows(self, length: int) -> Int32[Array, "repeats period"] | None:
        if all(window is None for window in self.windows):
            return None
        # What differs between layers only by a number is scanned, so that they share one program.
        numbers = [length if window is None else window for window in self.windows]
        return jnp.asarray(numbers, jnp.int32).reshape(self.repeats, -1)


def _stacked(make: MakeBlock, repeats: int, rngs: nnx.Rngs) -> nnx.Module:
    @nnx.split_rngs(splits=repeats)
    @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: None, "axes": "layers"})
    def make_all(rngs: nnx.Rngs) -> nnx.Module:
        return make(rngs)

    return make_all(rngs)


class Decoder(nnx.Module):
    """Token embedding, stacks of layers, final norm, output head."""

    def __init__(
        self,
        *,
        vocab_size: int,
        width: int,
        plans: Sequence[StackPlan],
        frequencies: Float32[np.ndarray, " half"],
        norm_eps: float,
        tie_word_embeddings: bool,
        std: float,
        remat: Remat,
        loss: TextLoss,
        rngs: nnx.Rngs,
    ):
        self.embed_tokens = Embedding(vocab_size, width, std=std, rngs=rngs)
        self.stacks = nnx.List([Stack(plan, remat=remat, rngs=rngs) for plan in plans])
        self.norm = RMSNorm("embed", width, eps=norm_eps, rngs=rngs)
        self.lm_head = None if tie_word_embeddings else Embedding(vocab_size, width, std=std, rngs=rngs)
        self.frequencies = tuple(float(f) for f in frequencies)
        self.loss = loss

    def __call__(self, batch: Batch) -> Outputs:
        """Hidden states of every token, and the objective `text`."""
        rotation = rope.rotation(batch.positions, np.asarray(self.frequencies, np.float32))
        span = spans.causal(batch.segment_ids)
        x = self.embed_tokens(batch.tokens)
        for stack in self.stacks:
            x = stack(x, rotation, span)
        hidden = self.norm(x)
        objective, metrics = self.loss(hidden, self._head(), batch.targets, batch.weights)
        return Outputs(hidden, {"text": objective}, metrics)

    def logits(self, hidden: Float[Array, "B S E"]) -> Float[Array, "B S V"]:
        """float32 logits of the next token; for sampling and tests, as training never holds them all at once."""
        logits = jnp.einsum("bse,ve->bsv", hidden, self._head(), preferred_element_type=jnp.float32)
        return constrain(logits, "batch", "length", "act_vocab")

    def _head(self) -> Float[Array, "V E"]:
        return (self.embed_tokens if self.lm_head is None else self.lm_head).embedding[...]
