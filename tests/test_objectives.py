"""The chunked cross-entropy against float64 numpy, on one device and on a mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from omnijax.objectives import TextLoss, weighted_cross_entropy
from sharding_rules import qwen3 as rules
from tests.meshes import on

ROWS, LENGTH, WIDTH, VOCAB = 8, 12, 10, 52


def inputs(seed: int = 0, vocab: int = VOCAB) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(seed)
    hidden = random.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
    head = random.normal(size=(vocab, WIDTH)).astype(np.float32)
    targets = random.integers(0, vocab, (ROWS, LENGTH), dtype=np.int32)
    weights = (random.random((ROWS, LENGTH)) * (random.random((ROWS, LENGTH)) < 0.7)).astype(np.float32)
    return hidden, head, targets, weights


def in_float64(hidden, head, targets, weights, z_loss: float) -> dict[str, np.ndarray]:
    hidden, head, weights = (x.astype(np.float64) for x in (hidden, head, weights))
    logits = hidden @ head.T
    top = logits.max(-1, keepdims=True)
    partition = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    target = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    entropy, z = (weights * (partition - target)).sum(), (weights * partition**2).sum()
    softmax = np.exp(logits - partition[..., None])
    slope = softmax * (1 + 2 * z_loss * partition)[..., None] - np.eye(head.shape[0])[targets]
    slope *= weights[..., None]
    return {
        "loss": entropy + z_loss * z,
        "entropy": entropy,
        "z": z,
        "hidden": slope @ head,
        "head": np.einsum("bsv,bse->ve", slope, hidden),
    }


def found(hidden, head, targets, weights, z_loss: float, chunk: int, vocab: int = VOCAB) -> dict[str, np.ndarray]:
    def loss(hidden, head):
        return weighted_cross_entropy(hidden, head, targets, weights, z_loss, chunk, vocab)

    (value, (entropy, z)), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(hidden, head)
    plain = jax.jit(loss)(hidden, head)
    np.testing.assert_allclose(plain[0], value, rtol=1e-6)
    return {"loss": value, "entropy": entropy, "z": z, "hidden": gradients[0], "head": gradients[1]}


def assert_close(x: dict, expected: dict, tolerance: float = 2e-6) -> None:
    for name, value in expected.items():
        error = np.abs(np.asarray(x[name], np.float64) - value).max() / np.abs(value).max()
        assert error <= tolerance, f"{name}: {error:.1e}"


# 96 tokens: divided by the chunk, not divided, one by one, all at once, fewer than the chunk.
@pytest.mark.parametrize("chunk", [32, 7, 1, 96, 1000])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_loss_and_gradients(chunk: int, z_loss: float) -> None:
    arrays = inputs()
    assert_close(found(*map(jnp.asarray, arrays), z_loss, chunk), in_float64(*arrays, z_loss))


def test_rows_that_fill_up_the_head_are_no_tokens() -> None:
    hidden, head, targets, weights = inputs()
    filled = np.concatenate([head, 5 * np.ones((4, WIDTH), np.float32)])
    result = found(*map(jnp.asarray, (hidden, filled, targets, weights)), 0.1, 16)
    assert (result["head"][VOCAB:] == 0).all()
    result["head"] = result["head"][:VOCAB]
    assert_close(result, in_float64(hidden, head, targets, weights, 0.1))


def test_no_weight_is_no_loss_and_no_gradient() -> None:
    hidden, head, targets, weights = (jnp.asarray(x) for x in inputs())
    result = found(1e4 * hidden, head, targets, 0 * weights, 0.1, 16)
    assert all(not np.any(x) for x in result.values())
    (total, weight), metrics = TextLoss()(hidden, head, targets, 0 * weights, VOCAB)
    assert (float(total), float(weight)) == (0.0, 0.0)
    assert {name: float(weight) for name, (_, weight) in metrics.items()} == {"cross_entropy": 0.0, "z": 0.0}


def test_bf16_has_float32_statistics() -> None:
    hidden, head, targets, weights = inputs()
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (hidden, head)]
    result = found(*narrow, jnp.asarray(targets), jnp.asarray(weights), 0.1, 16)
    assert {name: result[name].dtype for name in ("loss", "hidden")} == {"loss": jnp.float32, "hidden": jnp.bfloat16}
    rounded = [np.asarray(x, np.float32) for x in narrow]
    expected = in_float64(*rounded, targets, weights, 0.1)
    sums = {name: expected[name] for name in ("loss", "entropy", "z")}
    assert_close(result, sums, 2e-6)
    assert_close(result, expected, 1e-2)


@pytest.mark.parametrize("mesh_name", ["data 2 x sequence 2 x tensor 2", "sequence 8", "tensor 4 x data 2", "data 8"])
def test_any_mesh_gives_the_same(mesh_name: str) -> None:
    hidden, head, targets, weights = inputs()
    if mesh_name == "sequence 8":
        hidden, targets, weights = (np.concatenate([x, x], 1) for x in (hidden, targets, weights))
    with on(mesh_name, rules.table()) as mesh:
        rows = NamedSharding(mesh, PartitionSpec(("data",), "sequence"))
        placed = [jax.device_put(x, rows) for x in (hidden, targets, weights)]
        result = found(placed[0], jnp.asarray(head), placed[1], placed[2], 0.1, 3)
    assert_close(result, in_float64(hidden, head, targets, weights, 0.1))


def gradient_program(length: int, mesh_name: str | None = None) -> str:
    with on(mesh_name, rules.table()) as mesh:
        rows = NamedSharding(mesh, PartitionSpec(("data",), "sequence"))
        hidden = jax.ShapeDtypeStruct((8, length, 16), jnp.float32, sharding=rows)
        targets = jax.ShapeDtypeStruct((8, length), jnp.int32, sharding=rows)
        weights = jax.ShapeDtypeStruct((8, length), jnp.float32, sharding=rows)
        head = jax.ShapeDtypeStruct((776, 16), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
        gradient = jax.grad(lambda *arrays: weighted_cross_entropy(*arrays, 0.0, 64, 776)[0], argnums=(0, 1))
        return jax.jit(gradient).lower(hidden, head, targets, weights).compile().as_text()


def test_only_a_chunk_of_logits_exists() -> None:
    sizes = re.findall(r"f32\[([\d,]+)\]", gradient_program(512))
    with_vocabulary = [np.prod([int(n) for n in size.split(",")]) for size in sizes if "776" in size.split(",")]
    assert max(with_vocabulary) == 64 * 776


def test_devices_are_summed_once_after_the_last_chunk() -> None:
    """No loop holds a sum over devices of the head's gradient: with 8 chunks a device that would be 8 of them."""
    program = gradient_program(512, "data 8")
    computations = re.split(r"\n(?=%|ENTRY)", program)
    reducing = [text for text in computations if re.search(r"= [^=]*\[[\d,]*776[\d,]*\][^=]* all-reduce", text)]
    assert len(reducing) == 1
    assert reducing[0].startswith("ENTRY")
