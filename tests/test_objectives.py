"""The cross-entropy in chunks: values and gradients against float64 numpy, and the program XLA made of it."""

import math
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from omnijax import sharding
from omnijax.errors import UserError
from omnijax.mesh import make_mesh
from omnijax.objectives import TextLoss, weighted_cross_entropy
from omnijax.sharding import Rules, lines
from sharding_rules import qwen3 as rules
from tests.meshes import on
from tests.test_program import COLLECTIVE

BATCH, LENGTH, WIDTH, VOCABULARY = 4, 6, 10, 18
ALL = BATCH * LENGTH


def arrays(vocab: int = VOCABULARY, filled: int = 0) -> tuple[np.ndarray, ...]:
    """hidden, head, targets, weights; `filled` rows of the head are no tokens."""
    random = np.random.default_rng(0)
    hidden = random.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)
    head = random.normal(size=(vocab + filled, WIDTH)).astype(np.float32)
    targets = random.integers(0, vocab, (BATCH, LENGTH), dtype=np.int32)
    weights = (random.random((BATCH, LENGTH)) * (random.random((BATCH, LENGTH)) < 0.7)).astype(np.float32)
    return hidden, head, targets, weights


def expected(hidden, head, targets, weights, z_loss: float, vocab: int) -> dict[str, np.ndarray]:
    """Loss, its two terms and its gradients, by analysis."""
    hidden, head, weights = (np.asarray(x, np.float64) for x in (hidden, head, weights))
    logits = hidden @ head[:vocab].T
    log_partition = np.log(np.exp(logits).sum(-1))
    target = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    entropy, z = (weights * (log_partition - target)).sum(), (weights * log_partition**2).sum()
    slope = np.exp(logits - log_partition[..., None]) * (1 + 2 * z_loss * log_partition[..., None])
    slope = weights[..., None] * (slope - np.eye(vocab)[targets])
    head_gradient = np.zeros_like(head)
    head_gradient[:vocab] = np.einsum("bsv,bse->ve", slope, hidden)
    return {
        "loss": entropy + z_loss * z,
        "entropy": entropy,
        "z": z,
        "hidden": slope @ head[:vocab],
        "head": head_gradient,
    }


def found(hidden, head, targets, weights, z_loss: float, vocab: int, chunk: int) -> dict[str, jax.Array]:
    """The same from the code under test."""
    targets, weights = jnp.asarray(targets), jnp.asarray(weights)

    def loss(hidden, head):
        return weighted_cross_entropy(hidden, head, targets, weights, z_loss, chunk, vocab)

    differentiate = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (value, (entropy, z, _)), gradients = differentiate(hidden, head)
    return {"loss": value, "entropy": entropy, "z": z, "hidden": gradients[0], "head": gradients[1]}


def assert_close(found: dict, expected: dict, tolerance: float) -> None:
    for name, x in expected.items():
        error = np.abs(np.asarray(found[name], np.float64) - x).max() / np.abs(x).max()
        assert error <= tolerance, f"{name}: {error:.2e}"


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("chunk", [1, 7, ALL, ALL + 1000])
def test_loss_and_gradients(chunk: int, z_loss: float) -> None:
    """Chunks that divide the tokens and chunks that do not, of one token and of more than there are."""
    given = arrays()
    assert_close(found(*given, z_loss, VOCABULARY, chunk), expected(*given, z_loss, VOCABULARY), 2e-6)


def test_without_a_gradient_the_loss_is_the_same() -> None:
    given = arrays()
    loss, (entropy, z, _) = jax.jit(weighted_cross_entropy, static_argnums=(4, 5, 6))(*given, 0.3, 7, VOCABULARY)
    reference = expected(*given, 0.3, VOCABULARY)
    assert [float(x) for x in (loss, entropy, z)] == pytest.approx([reference[x] for x in ("loss", "entropy", "z")])


def test_each_source_has_a_loss_of_its_own() -> None:
    """That of the rows with all other sources' weights at 0; one with no token has weight 0."""
    hidden, head, targets, weights = arrays()
    sources = np.random.default_rng(3).integers(0, 2, targets.shape)
    given = map(jnp.asarray, (hidden, head, targets, weights))
    _, metrics = TextLoss(chunk=7)(*given, VOCABULARY, jnp.asarray(sources), 3)
    sums, counts = metrics["cross_entropy_by_source"]
    for source in range(3):
        own = weights * (sources == source)
        assert float(sums[source]) == pytest.approx(
            expected(hidden, head, targets, own, 0.0, VOCABULARY)["entropy"], rel=1e-5
        )
        assert float(counts[source]) == pytest.approx(own.sum())
    assert (float(sums[2]), float(counts[2])) == (0, 0)


def test_the_gradient_scales_with_what_comes_from_above() -> None:
    hidden, *rest = map(jnp.asarray, arrays())
    gradient = jax.grad(lambda x: weighted_cross_entropy(x, *rest, 0.3, 7, VOCABULARY)[0] / -8)(hidden)
    reference = expected(hidden, *rest, 0.3, VOCABULARY)["hidden"] / -8
    np.testing.assert_allclose(gradient, reference, atol=2e-6 * np.abs(reference).max())


def test_rows_that_fill_up_the_vocabulary_are_no_tokens() -> None:
    given = arrays(vocab=15, filled=3)
    result = found(*given, 0.3, 15, 7)
    assert_close(result, expected(*given, 0.3, 15), 2e-6)
    np.testing.assert_array_equal(result["head"][15:], 0)


def test_large_logits_stay_finite() -> None:
    """exp of a logit of 3,000 is none of float32's numbers."""
    hidden, head, targets, weights = arrays()
    result = found(300 * hidden, head, targets, weights, 0.0, VOCABULARY, 7)
    assert all(np.isfinite(x).all() for x in result.values())
    logits = 300 * hidden.astype(np.float64) @ head.T
    target = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    top = logits.max(-1)
    log_partition = top + np.log(np.exp(logits - top[..., None]).sum(-1))
    np.testing.assert_allclose(result["entropy"], (weights * (log_partition - target)).sum(), rtol=1e-5)


def test_no_weight_is_no_loss_and_no_gradient() -> None:
    hidden, head, targets, weights = arrays()
    result = found(hidden, head, targets, np.zeros_like(weights), 0.3, VOCABULARY, 7)
    for name, x in result.items():
        np.testing.assert_array_equal(x, np.zeros_like(x), err_msg=name)


def test_bf16_has_float32_statistics() -> None:
    """Only what enters and leaves is rounded: loss and terms are as exact as in float32."""
    hidden, head, targets, weights = arrays()
    narrow = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    result = found(*narrow, targets, weights, 0.3, VOCABULARY, 7)
    reference = expected(*narrow, targets, weights, 0.3, VOCABULARY)
    for name in ("loss", "entropy", "z"):
        assert result[name].dtype == np.float32
        np.testing.assert_allclose(result.pop(name), reference.pop(name), rtol=2e-6)
    assert all(x.dtype == jnp.bfloat16 for x in result.values())
    assert_close(result, reference, 1e-2)


def test_text_loss_reports_means() -> None:
    hidden, head, targets, weights = arrays()
    reference = expected(hidden, head, targets, weights, 0.3, VOCABULARY)
    objective, metrics = TextLoss(z_loss=0.3, chunk=7)(*map(jnp.asarray, (hidden, head, targets, weights)), VOCABULARY)
    total = weights.astype(np.float64).sum()
    for (value, weight), name in ((objective, "loss"), (metrics["cross_entropy"], "entropy"), (metrics["z"], "z")):
        assert float(value) == pytest.approx(reference[name], rel=2e-6)
        assert float(weight) == pytest.approx(total, rel=2e-6)


@pytest.mark.parametrize(("options", "message"), [({"chunk": 0}, "chunk 0"), ({"z_loss": -1.0}, "z_loss -1.0")])
def test_text_loss_refuses(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TextLoss(**options)


# On a mesh

MESH = "data 2 x sequence 2 x tensor 2"


@pytest.mark.parametrize(("vocab", "filled"), [(18, 0), (17, 0), (17, 1)], ids=["split", "whole", "filled up"])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_a_mesh_changes_nothing(chunk: int, vocab: int, filled: int) -> None:
    """6 tokens a device; `tensor` splits 18 rows of the head, and leaves 17 whole."""
    given = arrays(vocab, filled)
    with on(MESH, rules.table()):
        assert_close(found(*given, 0.3, vocab, chunk), expected(*given, 0.3, vocab), 2e-6)


def test_rows_and_tokens_that_a_mesh_does_not_divide() -> None:
    """4 rows on 8 parts, 6 tokens on 4: alternatives of the table, here as anywhere."""
    table = Rules((), lines(batch="replica data | replica | none", length="sequence | none", act_vocab="tensor"))
    given = arrays()
    for sizes in ({"replica": 2, "data": 4}, {"sequence": 4, "data": 2}):
        with sharding.use(make_mesh(**sizes), table):
            assert_close(found(*given, 0.3, VOCABULARY, 4), expected(*given, 0.3, VOCABULARY), 2e-6)


LONG, CHUNK = 128, 16  # tokens of a row; 4 x 128 / 4 tokens on a device of the mesh make 8 chunks


def program(mesh_name: str | None) -> str:
    """The compiled loss and gradients of a long batch; nothing is run."""
    shapes = (BATCH, LONG, WIDTH), (VOCABULARY, WIDTH), (BATCH, LONG), (BATCH, LONG)
    dtypes = jnp.float32, jnp.float32, jnp.int32, jnp.float32
    tokens = P("data", "sequence")
    with on(mesh_name, rules.table()) as mesh:
        hidden, head, targets, weights = (
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
            for shape, dtype, spec in zip(shapes, dtypes, (tokens, P("tensor", "data"), tokens, tokens), strict=True)
        )

        def loss(hidden, head, targets, weights):
            (total, _), _ = TextLoss(chunk=CHUNK)(hidden, head, targets, weights, VOCABULARY)
            return total

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        return step.lower(hidden, head, targets, weights).compile().as_text()


def sizes(shape: str) -> Iterator[list[int]]:
    """The axes of every array in a piece of a program."""
    for text in re.findall(r"\b(?:pred|bf16|[a-z]\d+)\[([\d,]+)\]", shape):
        yield [int(size) for size in text.split(",")]


def computations(text: str) -> dict[str, str]:
    """A compiled program as its computations, by name."""
    parts = re.findall(r"^(?:ENTRY )?%?([\w.-]+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    return dict(parts)


def loop(text: str) -> str:
    """The body of the only loop, and all that it calls."""
    parts = computations(text)
    waiting = re.findall(r"\bbody=%?([\w.-]+)", text)
    assert len(waiting) == 1
    reached: list[str] = []
    while waiting:
        name = waiting.pop()
        reached.append(name)
        called = re.findall(r"%([\w.-]+)", parts[name])
        waiting += [other for other in called if other in parts and other not in [*reached, *waiting]]
    return "\n".join(parts[name] for name in reached)


@pytest.mark.parametrize(("mesh_name", "parts"), [(None, 1), (MESH, 2)])
def test_logits_exist_for_one_chunk_at_a_time(mesh_name: str | None, parts: int) -> None:
    """No array with an axis of the vocabulary, or of a device's part of it, is larger than the logits of a chunk."""
    arrays = [size for size in sizes(program(mesh_name)) if {VOCABULARY, VOCABULARY // 2} & set(size)]
    assert max(map(math.prod, arrays)) == CHUNK * VOCABULARY // parts


def test_the_head_gradient_is_summed_once_and_logits_stay_where_they_are() -> None:
    """In the loop over chunks `tensor` reduces numbers of one a token; devices are summed after it."""
    text = program(MESH)
    everywhere, inside = ([(kind, list(sizes(s))) for s, kind in COLLECTIVE.findall(t)] for t in (text, loop(text)))
    assert inside
    for kind, arrays_moved in inside:
        # Hidden gradients are sums over the vocabulary, which `tensor` splits: the only large thing a chunk moves.
        assert all(math.prod(size) in (CHUNK, CHUNK * WIDTH) for size in arrays_moved), f"{kind}: {arrays_moved}"
        assert kind == "all-reduce"
    # Afterwards the head's gradient is summed over rows and tokens, as large as `tensor` leaves it.
    assert [VOCABULARY // 2, WIDTH] in [
        size[-2:] for kind, moved in everywhere for size in moved if kind == "all-reduce"
    ]
