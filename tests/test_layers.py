"""Norms, rotary positions and projections against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.layers import GatedMLP
from omnijax import parameters
from omnijax.nn import rope
from omnijax.nn.norms import RMSNorm
from omnijax.nn.projections import Embedding, Linear


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_phases_are_float32_and_right_at_every_position(dtype, theta: float) -> None:
    positions = np.array([[0, 1, 4095, 131071]])
    cos, sin = rope.rotation(jnp.asarray(positions), rope.inverse_frequencies(64, theta))
    phase = positions[..., None] * theta ** (-np.arange(0, 64, 2) / 64)
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos, np.cos(phase), atol=1e-2)
    np.testing.assert_allclose(sin, np.sin(phase), atol=1e-2)
    np.testing.assert_allclose(cos[:, :3], np.cos(phase)[:, :3], atol=5e-4)
    x = np.random.default_rng(0).normal(size=(1, 4, 3, 64))
    rotated = rope.rotate(jnp.asarray(x, dtype), (cos, sin))
    assert rotated.dtype == dtype
    c, s = np.cos(phase)[:, :, None], np.sin(phase)[:, :, None]
    first, second = x[..., :32], x[..., 32:]
    expected = np.concatenate([first * c - second * s, first * s + second * c], -1)
    np.testing.assert_allclose(rotated.astype(jnp.float32), expected, atol=3e-2 if dtype == jnp.bfloat16 else 2e-2)


def test_a_rotation_leaves_relative_positions_only() -> None:
    """q . k depends on the distance alone."""
    random = np.random.default_rng(1)
    q, k = (jnp.asarray(random.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def score(query: int, key: int) -> float:
        at = [rope.rotation(jnp.array([[position]]), rope.inverse_frequencies(16, 1e4)) for position in (query, key)]
        return float((rope.rotate(q, at[0]) * rope.rotate(k, at[1])).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), rel=1e-4)
    assert score(7, 3) != pytest.approx(score(3, 7), rel=1e-2)


def test_rms_norm_in_bf16_has_float32_statistics() -> None:
    x = np.random.default_rng(0).normal(size=(3, 5, 512)) * 100
    norm = RMSNorm("embed", 512, eps=1e-6, rngs=nnx.Rngs(0))
    norm.scale[...] = jnp.linspace(0.5, 2, 512)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.linspace(0.5, 2, 512)
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), expected, rtol=2e-5, atol=1e-6)
    graphdef, params = parameters.split(norm)
    narrow = parameters.merge(graphdef, parameters.cast(params, jnp.bfloat16))(jnp.asarray(x, jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(np.float32), expected, rtol=2e-2, atol=1e-2)


def test_a_linear_map_between_any_axes() -> None:
    layer = Linear((("heads", 3), ("head_dim", 4)), (("embed", 5),), std=1.0, bias=True, rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.arange(5.0)
    x = np.random.default_rng(0).normal(size=(2, 7, 3, 4))
    expected = np.einsum("bshd,hde->bse", x, np.asarray(layer.kernel[...], np.float64)) + np.arange(5)
    np.testing.assert_allclose(layer(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=1e-5)
    described = parameters.describe(layer)
    assert (described["kernel"].axes, described["kernel"].shape) == (("heads", "head_dim", "embed"), (3, 4, 5))
    assert (described["kernel"].inputs, described["bias"].inputs) == (2, 0)


def test_a_gated_mlp_by_hand() -> None:
    layer = GatedMLP(width=6, hidden=9, std=0.7, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 4, 6))
    maps = (layer.gate_proj, layer.up_proj, layer.down_proj)
    gate, up, down = (np.asarray(each.kernel[...], np.float64) for each in maps)
    hidden = x @ gate
    expected = (hidden / (1 + np.exp(-hidden)) * (x @ up)) @ down
    np.testing.assert_allclose(layer(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=1e-5)


def test_an_embedding_reads_and_gives_gradients_to_the_rows_it_read() -> None:
    table = Embedding(11, 3, std=1.0, rngs=nnx.Rngs(0), multiple=4)
    assert table.embedding.shape == (12, 3)
    assert (table.embedding[...][11:] == 0).all()
    tokens = jnp.array([[3, 3, 7]])
    graphdef, params = parameters.split(table)
    gradient = jax.grad(lambda params: parameters.merge(graphdef, params)(tokens).sum())(params)["embedding"]
    np.testing.assert_array_equal(gradient.sum(-1), 3 * np.bincount([3, 3, 7], minlength=12))


def test_parameters_are_normal_with_the_asked_deviation() -> None:
    kernel = Linear((("embed", 200),), (("mlp", 300),), std=0.05, rngs=nnx.Rngs(0)).kernel[...]
    assert float(kernel.std()) == pytest.approx(0.05, rel=0.02)
    assert abs(float(kernel.mean())) < 1e-3
    assert kernel.dtype == jnp.float32
