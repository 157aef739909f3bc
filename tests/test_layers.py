"""Norms, rotary positions and linear maps against float64 numpy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.layers import GatedMLP
from omnijax import parameters
from omnijax.nn.norms import RMSNorm
from omnijax.nn.projections import Embedding, Linear
from omnijax.nn.rope import inverse_frequencies, rotate, rotation
from omnijax.parameters import Description

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(2, 3, 8))
EPSILON = {"float32": 2e-6, "bfloat16": 2e-2}


def filled(module: Any, dtype: str = "float32") -> tuple[Any, dict[str, np.ndarray]]:
    """A module with random parameters, so that none is 0 or 1, and what they are in float64."""
    graphdef, params = parameters.split(module)
    params = {path: jnp.asarray(RANDOM.normal(size=x.shape), dtype) for path, x in params.items()}
    return parameters.merge(graphdef, params), {path: wide(x) for path, x in params.items()}


def wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("dtype", EPSILON)
def test_rms_norm(dtype: str) -> None:
    norm = RMSNorm("embed", 8, eps=1e-2, rngs=nnx.Rngs(0))
    assert parameters.describe(norm) == {"scale": Description(("embed",), (8,))}
    np.testing.assert_array_equal(norm.scale[...], np.ones(8))
    norm, values = filled(norm, dtype)
    x = X * 0.1  # of the size of sqrt(eps), which therefore counts
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-2) * values["scale"]
    found = norm(jnp.asarray(x, dtype))
    assert found.dtype == dtype
    np.testing.assert_allclose(wide(found), expected, atol=EPSILON[dtype] * np.abs(expected).max())


def test_rms_norm_rounds_only_its_result() -> None:
    """Statistics and quotient are float32, so that a bf16 result is off by half of its last bit and no more."""
    x = jnp.asarray(RANDOM.normal(size=(16, 256)), jnp.bfloat16)
    found = RMSNorm("embed", 256, eps=1e-6, rngs=nnx.Rngs(0))(x)
    expected = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(wide(found), expected, rtol=1.01 * 2**-8)


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_rotations_are_float32_far_out(theta: float) -> None:
    positions = np.array([[0, 4095, 131071]], np.int32)
    phase = positions[..., None] * theta ** (-np.arange(64, dtype=np.float64) / 64)
    tables = rotation(jnp.asarray(positions), inverse_frequencies(128, theta))
    for found, expected in zip(tables, (np.cos(phase), np.sin(phase)), strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=1e-2)
        np.testing.assert_allclose(found[:, 0], expected[:, 0], atol=0)


@pytest.mark.parametrize("dtype", EPSILON)
def test_rotate(dtype: str) -> None:
    """Channels i and i + D / 2 are the two parts of one complex number, which is turned."""
    positions = np.array([[0, 1, 5], [2, 4095, 3]], np.int32)
    x = RANDOM.normal(size=(2, 3, 4, 6))
    numbers = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * positions[:, :, None, None] * 100.0 ** (-np.arange(3) / 3))
    expected = np.concatenate([numbers.real, numbers.imag], -1)
    by = rotation(jnp.asarray(positions), inverse_frequencies(6, 100.0))
    found = rotate(jnp.asarray(x, dtype), by)
    assert found.dtype == dtype
    tolerance = max(EPSILON[dtype], 1e-3)  # float32 knows a phase of 4,095 to about 2e-4
    np.testing.assert_allclose(wide(found), expected, atol=tolerance * np.abs(x).max())
    np.testing.assert_array_equal(found[0, 0], jnp.asarray(x[0, 0], dtype))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("inputs", "outputs", "equation"),
    [
        ((("embed", 8),), (("mlp", 5),), "bse,em->bsm"),
        ((("embed", 8),), (("heads", 3), ("head_dim", 7)), "bse,ehd->bshd"),
        ((("heads", 3), ("head_dim", 7)), (("embed", 8),), "bshd,hde->bse"),
    ],
    ids=["one to one", "one to two", "two to one"],
)
def test_linear(inputs: tuple, outputs: tuple, equation: str, bias: bool) -> None:
    layer = Linear(inputs, outputs, std=0.1, bias=bias, rngs=nnx.Rngs(0))
    names, shape = zip(*inputs, *outputs, strict=True)
    expected = {"kernel": Description(names, shape, inputs=len(inputs))}
    if bias:
        expected["bias"] = Description(names[len(inputs) :], shape[len(inputs) :], inputs=0)
        np.testing.assert_array_equal(layer.bias[...], np.zeros(shape[len(inputs) :]))
    assert parameters.describe(layer) == expected
    layer, values = filled(layer)
    x = RANDOM.normal(size=(2, 3, *shape[: len(inputs)]))
    y = np.einsum(equation, x, values["kernel"]) + values.get("bias", 0)
    np.testing.assert_allclose(layer(jnp.asarray(x, jnp.float32)), y, atol=2e-6 * np.abs(y).max())


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda rngs: Linear((("embed", 200),), (("mlp", 300),), std=0.02, rngs=rngs), "kernel"),
        (lambda rngs: Embedding(300, 200, std=0.02, rngs=rngs), "embedding"),
    ],
)
def test_fresh_weights_have_the_deviation_asked_for(make: Callable, path: str) -> None:
    values = np.asarray(parameters.split(make(nnx.Rngs(0)))[1][path])
    assert values.dtype == np.float32
    assert values.mean() == pytest.approx(0, abs=5 * 0.02 / np.sqrt(values.size))
    assert values.std() == pytest.approx(0.02, rel=0.02)


def test_embedding() -> None:
    table = Embedding(11, 8, std=0.1, rngs=nnx.Rngs(0), multiple=4)
    assert parameters.describe(table) == {"embedding": Description(("vocab", "embed"), (12, 8), rows=11)}
    np.testing.assert_array_equal(table.embedding[...][11:], np.zeros((1, 8)))
    plain = Embedding(11, 8, std=0.1, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(table.embedding[...][:11], plain.embedding[...])
    table, values = filled(table)
    tokens = np.array([[0, 10, 3], [7, 7, 1]], np.int32)
    np.testing.assert_array_equal(table(jnp.asarray(tokens)), values["embedding"][tokens])


def test_gated_mlp() -> None:
    layer = GatedMLP(width=8, hidden=5, std=0.1, bias=True, rngs=nnx.Rngs(0))
    layer, values = filled(layer)

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ values[f"{name}.kernel"] + values[f"{name}.bias"]

    gate = linear("gate_proj", X)
    expected = linear("down_proj", gate / (1 + np.exp(-gate)) * linear("up_proj", X))
    np.testing.assert_allclose(layer(jnp.asarray(X, jnp.float32)), expected, atol=2e-6 * np.abs(expected).max())
