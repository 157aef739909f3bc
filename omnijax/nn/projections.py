"""Parameters with named axes, and the linear maps made of them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from omnijax.sharding import constrain, split_count

Axes = Sequence[tuple[str | None, int]]
"""Named sizes, e.g. `(("heads", 6), ("head_dim", 12))`; an axis without a name is never split."""


def param(rngs: nnx.Rngs, init: Callable[..., Array], axes: Axes, **metadata: Any) -> nnx.Param:
    """A float32 parameter whose shape and axis names are `axes`; other `metadata` is kept beside them."""
    names, shape = tuple(name for name, _ in axes), tuple(size for _, size in axes)
    return nnx.Param(init(rngs.params(), shape, jnp.float32), axes=names, **metadata)


class Linear(nnx.Module):
    """`y = x W + b` from the axes `inputs` to the axes `outputs`; `kernel` is `[*inputs, *outputs]`.

    The metadata `inputs` of its parameters counts the axes they contract, for checkpoints that flatten them.
    """

    def __init__(self, inputs: Axes, outputs: Axes, *, std: float, rngs: nnx.Rngs, bias: bool = False):
        init = nnx.initializers.normal(std)
        self.kernel = param(rngs, init, (*inputs, *outputs), inputs=len(inputs))
        self.bias = param(rngs, nnx.initializers.zeros, outputs, inputs=0) if bias else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        y = contract(x, self.kernel[...], self.kernel.inputs)
        return y if self.bias is None else y + self.bias[...]


def contract(x: Float[Array, "..."], kernel: Float[Array, "..."], count: int) -> Float[Array, "..."]:
    """The last `count` axes of `x` by the first of `kernel`."""
    if split_count("length") == 1:
        # Rows and tokens as one axis: with two, XLA's CPU backend copies both sides of the weight's gradient.
        # Where tokens are split over devices, one axis could not say which device holds what.
        tokens, outputs = x.shape[:-count], kernel.shape[count:]
        y = x.reshape(math.prod(tokens), -1) @ kernel.reshape(-1, math.prod(outputs))
        return y.reshape(*tokens, *outputs)
    contracted = (tuple(range(x.ndim - count, x.ndim)), tuple(range(count)))
    return jax.lax.dot_general(x, kernel, (contracted, ((), ())))


class Embedding(nnx.Module):
    """A table `[vocab, embed]`, read by token id; also the output head, as logits are `hidden @ table.T`.

    The table is filled up with rows of zeros to a multiple of `multiple`, so that a mesh axis may split it; its
    metadata `rows` counts the real ones.
    """

    def __init__(self, vocab_size: int, width: int, *, std: float, rngs: nnx.Rngs, multiple: int = 1):
        padding = -vocab_size % multiple

        def init(key: Array, shape: tuple[int, int], dtype: Any) -> Array:
            real = nnx.initializers.normal(std)(key, (vocab_size, width), dtype)  # the same numbers for any multiple
            return jnp.pad(real, ((0, padding), (0, 0)))

        self.embedding = param(rngs, init, (("vocab", vocab_size + padding), ("embed", width)), rows=vocab_size)

    def __call__(self, tokens: Int[Array, "B S"]) -> Float[Array, "B S E"]:
        # A gather from a table that is still sharded makes XLA rematerialise it whole, with a warning: ask for it.
        table = constrain(self.embedding[...], None, None)
        return constrain(table[tokens], "batch", "length", "act_embed")
