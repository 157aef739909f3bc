"""Held-out chats answered by the model itself: how often it says exactly what it should."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, Shaped

from omnijax import parameters
from omnijax.batch import Batch
from omnijax.data.packing import Rows
from omnijax.data.tokenizer import Tokenizer
from omnijax.parameters import Parameters
from omnijax.sharding import Rules
from omnijax.step import put_batch, put_rows


@dataclass(frozen=True)
class Answer:
    """What one chat's first answer should be, and what the model said, as far as that is long."""

    row_id: str
    wanted: str
    said: str
    right: bool


@dataclass(frozen=True)
class Place:
    """Where the first answer of a document stands in a row: the tokens from `first` to `end`."""

    row: int
    document: int
    first: int
    end: int


def answering(model: nnx.Module, mesh: Mesh, *, dtype: jnp.dtype) -> Callable[[Parameters, Batch, Array], Array]:
    """The compiled `(params, batch, places [B, K]) -> [B, K]`: the likeliest token after each place of a row."""
    graphdef = nnx.graphdef(model)

    def following(params: Parameters, batch: Batch, places: Int32[Array, "B K"]) -> Int32[Array, "B K"]:
        whole = parameters.merge(graphdef, parameters.cast(params, dtype, model))
        hidden = jnp.take_along_axis(whole(batch).hidden, places[..., None], axis=1)
        return whole.logits(hidden).argmax(-1).astype(jnp.int32)

    return jax.jit(following, out_shardings=NamedSharding(mesh, PartitionSpec()))


def answer(
    follow: Callable[[Parameters, Batch, Array], Array],
    params: Parameters,
    steps: Sequence[Rows],
    tokenizer: Tokenizer,
    mesh: Mesh,
    rules: Rules,
) -> list[Answer]:
    """Answer the first question of every document of packed rows, greedily, those of a step all at once.

    A token at a time is written over the answer that stands there, which so decides nothing but the longest that is
    said. A step costs as many passes as its longest answer has tokens.
    """
    places = [first_answers(rows.arrays) for rows in steps]
    most = max((place.document + 1 for each in places for place in each), default=0)
    found = []
    for rows, own in zip(tqdm.tqdm(steps, "answering", leave=False, delay=2, disable=None), places, strict=True):
        if own:
            found += _answer_step(follow, params, rows, own, most, tokenizer, mesh, rules)
    return found


def _answer_step(follow, params, rows: Rows, places: Sequence[Place], most: int, tokenizer, mesh, rules):
    wanted = rows.arrays["tokens"]
    said = wanted.copy()
    for offset in range(max(place.end - place.first for place in places)):
        before = np.zeros((len(said), most), np.int32)
        for place in places:
            before[place.row, place.document] = min(place.first + offset, place.end - 1) - 1
        batch = put_batch({**rows.arrays, "tokens": said}, mesh, rules)
        following = np.asarray(follow(params, batch, put_rows("places", before, mesh, rules)))
        for place in places:
            if place.first + offset < place.end:
                said[place.row, place.first + offset] = following[place.row, place.document]
    for place in places:
        own = place.row, slice(place.first, place.end)
        yield Answer(
            rows.row_ids[place.row][place.document],
            wanted=tokenizer.decode(wanted[own]),
            said=tokenizer.decode(said[own]),
            right=bool((wanted[own] == said[own]).all()),
        )


def first_answers(arrays: Mapping[str, Shaped[np.ndarray, "rows ..."]]) -> list[Place]:
    """Of each document of packed rows that has a label, the first tokens in a run that are labels."""
    found = []
    for row, (segments, weights) in enumerate(zip(arrays["segment_ids"], arrays["weights"], strict=True)):
        for document in range(1, segments.max() + 1):
            labels = np.flatnonzero((segments == document) & (weights > 0))  # the tokens before those of the answer
            if labels.size:
                run = labels[: int(np.argmax(np.diff(labels, append=labels[-1] + 2) > 1)) + 1]
                found.append(Place(row, document - 1, int(run[0]) + 1, int(run[-1]) + 2))
    return found
