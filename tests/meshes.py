"""The meshes every family is tested on, and a batch that splits on all of them."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax.sharding import Mesh

from omnijax import sharding
from omnijax.mesh import make_mesh
from omnijax.sharding import Rules

MESHES = {
    "data 8": {"data": 8},
    "replica 2 x data 4": {"replica": 2, "data": 4},
    "tensor 4 x data 2": {"tensor": 4, "data": 2},
    "sequence 8": {"data": 1, "sequence": 8},
    "sequence 4 x data 2": {"sequence": 4, "data": 2},
    "data 2 x sequence 2 x tensor 2": {"data": 2, "sequence": 2, "tensor": 2},
    "expert 4 x data 2": {"data": 2, "expert": 4},
    "expert 8": {"data": 1, "expert": 8},
    "expert 2 x sequence 2 x data 2": {"data": 2, "expert": 2, "sequence": 2},
    "expert 2 x tensor 2 x sequence 2": {"data": 1, "expert": 2, "sequence": 2, "tensor": 2},
}


@contextmanager
def on(name: str | None, rules: Rules) -> Iterator[Mesh]:
    """A mesh of `MESHES` in use with a table; None is one device."""
    mesh = make_mesh(data=1, devices=jax.devices()[:1]) if name is None else make_mesh(**MESHES[name])
    with sharding.use(mesh, rules):
        yield mesh


def packed_arrays(*, rows: int = 8, length: int = 48, vocab: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Packed rows of random tokens: documents of uneven lengths, some rows padded, one row with no weight at all."""
    random = np.random.default_rng(seed)
    segments, positions = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
    for row in range(rows):
        end = length - int(random.integers(0, 9)) * (row % 2)
        starts = [0, *sorted(random.choice(np.arange(1, end), size=row % 4, replace=False).tolist())]
        for number, (first, last) in enumerate(zip(starts, [*starts[1:], end], strict=True), 1):
            segments[row, first:last] = number
            positions[row, first:last] = np.arange(last - first)
    tokens = random.integers(0, vocab, (rows, length), dtype=np.int32)
    weights = (random.random((rows, length)) < 0.8) * (segments > 0)
    weights[3:4] = 0
    targets = random.integers(0, vocab, (rows, length), dtype=np.int32)
    return {
        "tokens": tokens,
        "segment_ids": segments,
        "positions": positions,
        "targets": targets,
        "weights": weights.astype(np.float32),
        "sources": np.zeros_like(tokens),
    }


def arrays_of(batch, units: int | None = None) -> dict[str, np.ndarray]:
    """A batch as the flat arrays that the data stream gives, with so many units in each row."""
    flat = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    media, slots = flat.pop("media"), flat.pop("slots")
    flat |= {f"slots.{name}": x for name, x in slots.items()}
    for name, each in media.items():
        for field in dataclasses.fields(each):
            x = np.asarray(getattr(each, field.name))
            room = (units or x.shape[1]) - x.shape[1]
            flat[f"media.{name}.{field.name}"] = np.pad(x, ((0, 0), (0, room), *((0, 0),) * (x.ndim - 2)))
    return {name: np.asarray(x) for name, x in flat.items()}
