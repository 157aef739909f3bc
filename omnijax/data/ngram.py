"""The n-gram baseline: what counting alone predicts."""

import numpy as np
from jaxtyping import Int

from omnijax.errors import UserError


def ngram_bits(
    train_tokens: Int[np.ndarray, "train"],
    heldout_tokens: Int[np.ndarray, "heldout"],
    order: int,
    vocab: int,
    smoothing: float = 0.1,
) -> float:
    """Bits a held-out token under an n-gram model of the training tokens (order 2: bigram).

    p(next | context) = (count(context, next) + smoothing) / (count(context) + smoothing * vocab), where context is the
    `order - 1` tokens before and only contexts with a successor are counted. The first `order - 1` held-out tokens
    have no full context and are not scored.

    Raises `UserError` for ids outside 0..vocab-1, fewer tokens than `order`, or vocab**order beyond 64 bits.
    """
    if order < 1 or vocab < 1 or vocab**order >= 2**63:
        bounds = "order and vocab must be at least 1 and vocab**order below 2**63"
        raise UserError(f"an n-gram of order {order} over {vocab} ids cannot be counted: {bounds}")
    if not smoothing > 0:
        raise UserError(f"n-gram smoothing is {smoothing}: it must be above 0, or an unseen n-gram costs infinite bits")
    grams, counts = np.unique(_grams("train_tokens", train_tokens, order, vocab), return_counts=True)
    contexts, first = np.unique(grams // vocab, return_index=True)
    context_counts = np.add.reduceat(counts, first)
    heldout = _grams("heldout_tokens", heldout_tokens, order, vocab)
    seen = _look_up(grams, counts, heldout)
    seen_contexts = _look_up(contexts, context_counts, heldout // vocab)
    return float(np.mean(np.log2(seen_contexts + smoothing * vocab) - np.log2(seen + smoothing)))


def _grams(name: str, tokens: np.ndarray, order: int, vocab: int) -> np.ndarray:
    """Each run of `order` tokens as one number, its last token the lowest digit in base `vocab`."""
    if len(tokens) < order:
        raise UserError(f"{name} has {len(tokens)} tokens: an n-gram of order {order} needs at least {order}")
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise UserError(f"{name} has ids {tokens.min()}..{tokens.max()}: they must lie in 0..{vocab - 1}; mend vocab")
    grams = np.zeros(len(tokens) - order + 1, np.int64)
    for digit in range(order):
        grams = grams * vocab + tokens[digit : digit + len(grams)]
    return grams


def _look_up(keys: np.ndarray, counts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The count of each wanted key, 0 where it was never seen; `keys` are sorted."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, counts[at], 0)
