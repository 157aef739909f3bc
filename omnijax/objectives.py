"""Training objectives. Each is a sum and a weight; the step adds them over the mesh and divides once.

Legend: x, y = groups of rows and of tokens that live on one device; c = tokens of a chunk; V = vocabulary; E = width.
"""

import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from omnijax.errors import UserError
from omnijax.sharding import constrain, split_count

Mean = tuple[Float32[Array, ""], Float32[Array, ""]]
"""A mean that is not divided yet: (sum, weight)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outputs:
    """What a model returns: hidden states [B, S, E], the objectives to minimise, and means to report."""

    hidden: Float[Array, "B S E"]
    objectives: dict[str, Mean] = field(default_factory=dict)
    metrics: dict[str, Mean] = field(default_factory=dict)


@dataclass(frozen=True)
class TextLoss:
    """Next-token cross-entropy.

    z_loss: weight of the squared log-partition (PaLM, Chowdhery et al. 2022, sec. 5); 0 turns it off.
    chunk:  tokens per device whose logits exist at once.
    """

    z_loss: float = 0.0
    chunk: int = 1024

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.z_loss < 0:
            raise UserError(f"TextLoss: chunk {self.chunk} must be positive and z_loss {self.z_loss} not negative")

    def __call__(
        self,
        hidden: Float[Array, "B S E"],
        head: Float[Array, "V E"],
        targets: Int[Array, "B S"],
        weights: Float[Array, "B S"],
        vocab_size: int,
        sources: Int[Array, "B S"] | None = None,
        source_count: int = 1,
    ) -> tuple[Mean, dict[str, Mean]]:
        """The objective, and the means `cross_entropy` and `z` (the mean squared log-partition) to report.

        Of several `sources`, numbered from 0, `cross_entropy_by_source` has a mean [source_count] each. Rows of `head`
        from `vocab_size` on fill it up; they are no tokens.
        """
        weights = weights.astype(jnp.float32)
        head = constrain(head, "act_vocab", None)
        loss, (entropy, z, terms) = weighted_cross_entropy(
            hidden, head, targets, weights, self.z_loss, self.chunk, vocab_size
        )
        total = weights.sum()
        metrics = {"cross_entropy": (entropy, total), "z": (z, total)}
        if sources is not None and source_count > 1:
            of_source = sources == jnp.arange(source_count)[:, None, None]
            sums, counts = (jnp.where(of_source, x, 0).sum((1, 2)) for x in (terms, weights))
            metrics["cross_entropy_by_source"] = (sums, counts)
        return (loss, total), metrics


Sums = tuple[Float32[Array, ""], tuple[Float32[Array, ""], Float32[Array, ""], Float32[Array, "B S"]]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def weighted_cross_entropy(
    hidden: Float[Array, "B S E"],
    head: Float[Array, "V E"],
    targets: Int[Array, "B S"],
    weights: Float32[Array, "B S"],
    z_loss: float,
    chunk: int,
    vocab_size: int,
) -> Sums:
    """`sum_t w_t (lse_t - logit_t[target_t] + z_loss lse_t^2)`; its two terms without `z_loss`, the first by token too.

    Logits exist for one chunk at a time. The gradient flows to `hidden` and `head` from the first result alone; as it
    is linear in a scalar it is computed beside the loss, which saves computing the logits a second time.
    """
    return _chunks(hidden, head, targets, weights, z_loss, chunk, vocab_size, with_gradient=False)[0]


def _forward(hidden, head, targets, weights, z_loss, chunk, vocab_size):
    return _chunks(hidden, head, targets, weights, z_loss, chunk, vocab_size, with_gradient=True)


def _backward(z_loss, chunk, vocab_size, residuals, cotangents):
    hidden_gradient, head_gradient = residuals
    dtype = hidden_gradient.dtype  # that of `hidden` and `head`
    scale = cotangents[0]
    return (hidden_gradient * scale).astype(dtype), (head_gradient * scale).astype(dtype), None, None


weighted_cross_entropy.defvjp(_forward, _backward)


def _chunks(hidden, head, targets, weights, z_loss, chunk, vocab_size, *, with_gradient):
    rows, lengths = split_count("batch", targets.shape[0]), split_count("length", targets.shape[1])
    tokens = targets.size // (rows * lengths)
    chunk = min(chunk, tokens)
    groups = functools.partial(_to_chunks, rows=rows, lengths=lengths, chunk=chunk)
    ids = jnp.arange(head.shape[0])

    def one_chunk(carry, inputs):
        (entropy, z), head_gradient = carry
        x, target, weight = inputs
        logits = jnp.einsum("xyce,ve->xycv", x, head, preferred_element_type=jnp.float32)
        logits = constrain(logits, "batch", "length", None, "act_vocab")
        if head.shape[0] > vocab_size:
            logits = jnp.where(ids < vocab_size, logits, -1e30)
        top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        unnormalised = jnp.exp(logits - top)
        partition = unnormalised.sum(-1, keepdims=True)
        log_partition = (jnp.log(partition) + top)[..., 0]
        # A comparison, not a gather: it fuses, needs no scatter backwards, and works on a split vocabulary.
        hit = ids == target[..., None]
        target_logit = jnp.where(hit, logits, 0).sum(-1)
        terms = weight * (log_partition - target_logit)
        entropy += terms.sum()
        z += (weight * log_partition**2).sum()
        if not with_gradient:
            return ((entropy, z), head_gradient), (terms, None)
        # d/dlogits of the loss: softmax (1 + 2 z_loss lse) - onehot, times the weight
        slope = unnormalised * ((weight * (1 + 2 * z_loss * log_partition))[..., None] / partition)
        slope = (slope - jnp.where(hit, weight[..., None], 0)).astype(x.dtype)
        x_gradient = jnp.einsum("xycv,ve->xyce", slope, head, preferred_element_type=jnp.float32)
        # x and y stay: every device sums its own tokens, and devices are summed once, after the last chunk.
        head_gradient += jnp.einsum("xycv,xyce->xyve", slope, x, preferred_element_type=jnp.float32)
        head_gradient = constrain(head_gradient, "batch", "length", "act_vocab", None)
        return ((entropy, z), head_gradient), (terms, x_gradient.astype(x.dtype))

    zero = jnp.zeros((), jnp.float32)
    head_gradient = jnp.zeros((rows, lengths, *head.shape) if with_gradient else (), jnp.float32)
    inputs = tuple(groups(x) for x in (hidden, targets, weights))
    carry, (terms, x_gradient) = jax.lax.scan(one_chunk, ((zero, zero), head_gradient), inputs)
    (entropy, z), head_gradient = carry
    sums = (entropy + z_loss * z, (entropy, z, _from_chunks(terms, targets.shape, rows, lengths)))
    if not with_gradient:
        return sums, None
    return sums, (_from_chunks(x_gradient, hidden.shape, rows, lengths), head_gradient.sum((0, 1)))


def _to_chunks(x: Array, *, rows: int, lengths: int, chunk: int) -> Array:
    """[B, S, ...] to [chunks, rows, lengths, chunk, ...] without moving a token off its device; padded with zeros."""
    batch, length, *rest = x.shape
    x = x.reshape(rows, batch // rows, lengths, length // lengths, *rest).swapaxes(1, 2)
    x = x.reshape(rows, lengths, -1, *rest)
    padding = -x.shape[2] % chunk
    if padding:
        x = jnp.pad(x, [(0, 0), (0, 0), (0, padding), *((0, 0) for _ in rest)])
    x = x.reshape(rows, lengths, -1, chunk, *rest)
    return jnp.moveaxis(x, 2, 0)


def _from_chunks(x: Array, shape: tuple[int, ...], rows: int, lengths: int) -> Array:
    """The inverse of `_to_chunks`."""
    batch, length, *rest = shape
    x = jnp.moveaxis(x, 0, 2).reshape(rows, lengths, -1, *rest)
    x = x[:, :, : (batch // rows) * (length // lengths)]
    return x.reshape(rows, lengths, batch // rows, length // lengths, *rest).swapaxes(1, 2).reshape(shape)
