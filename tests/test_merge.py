"""Media in a batch: on the mesh, and among the tokens of their row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from omnijax.nn.merge import merge
from omnijax.step import put_batch
from sharding_rules import qwen3 as rules
from tests.meshes import on, packed_arrays

ROWS, LENGTH, UNITS, WIDTH = 8, 24, 10, 16


def row_arrays() -> dict[str, np.ndarray]:
    """Text with two items of media in some rows; no token of row 1 stands for a unit."""
    random = np.random.default_rng(4)
    slots = np.full((ROWS, LENGTH), -1, np.int32)
    for row in range(ROWS):
        if row != 1:
            slots[row, 5 : 5 + row] = np.arange(row)
            slots[row, 14:17] = np.arange(7, 10)
    return {
        **packed_arrays(rows=ROWS, length=LENGTH, vocab=32),
        "slots.image": slots,
        "media.image.features": random.normal(size=(ROWS, UNITS, WIDTH)).astype(np.float32),
        "media.image.unit_segments": np.ones((ROWS, UNITS), np.int32),
        "media.image.unit_positions": np.zeros((ROWS, UNITS, 2), np.int32),
        "media.image.unit_grid": np.ones((ROWS, UNITS, 3), np.int32),
        "media.image.unit_valid": np.ones((ROWS, UNITS), np.int32),
    }


@pytest.mark.parametrize("mesh_name", [None, "sequence 8", "data 2 x sequence 2 x tensor 2", "data 8"])
def test_features_stand_where_slots_say(mesh_name: str | None) -> None:
    """On any mesh the rows and the gradient of the features are those of a loop over tokens."""
    arrays, table = row_arrays(), rules.table()
    text = np.random.default_rng(5).normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
    expected, gradient = text.copy(), np.zeros((ROWS, UNITS, WIDTH), np.float32)
    for row, token in np.argwhere(arrays["slots.image"] >= 0):
        unit = arrays["slots.image"][row, token]
        expected[row, token] = arrays["media.image.features"][row, unit]
        gradient[row, unit] += 2 * expected[row, token]

    def loss(features, batch):
        merged = merge(jnp.asarray(text), features[:, :UNITS], batch.slots["image"][:, :LENGTH])
        return (merged**2).sum(), merged

    with on(mesh_name, table) as mesh:
        batch = put_batch(arrays, mesh, table)
        (_, merged), found = jax.jit(jax.value_and_grad(loss, has_aux=True))(batch.media["image"].features, batch)
    np.testing.assert_array_equal(merged, expected)
    np.testing.assert_allclose(found[:, :UNITS], gradient, rtol=1e-6)


def test_what_a_mesh_adds_is_no_unit_and_no_token() -> None:
    """Ten units over eight parts: six more, of no document; no token asks for them."""
    arrays = row_arrays()
    arrays["slots.image"] = arrays["slots.image"][:, :21]
    table = rules.table()
    with on("sequence 8", table) as mesh:
        batch = put_batch(arrays, mesh, table)
    assert batch.media["image"].features.shape == (ROWS, 16, WIDTH)
    assert (np.asarray(batch.media["image"].unit_segments)[:, UNITS:] == 0).all()
    assert batch.slots["image"].shape == (ROWS, LENGTH)
    assert (np.asarray(batch.slots["image"])[:, 21:] == -1).all()
