"""A vocabulary that `tensor` does not divide is filled up inside, and nobody outside sees it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from omnijax import hf, parameters
from omnijax.batch import Batch
from sharding_rules import qwen3 as rules
from tests import laws
from tests.meshes import on, packed_arrays
from tests.test_program import COLLECTIVE, compiled_step
from tests.test_qwen3 import TINY

ODD = dataclasses.replace(TINY, vocab_size=203)
TIED = dataclasses.replace(ODD, tie_word_embeddings=True)


@pytest.mark.parametrize("config", [ODD, TIED], ids=["untied", "tied"])
def test_a_filled_up_vocabulary_trains_as_the_plain_one(config) -> None:
    expected = laws.run(config, rules.table(), None)
    found = laws.run(config, rules.table(), "tensor 4 x data 2", vocab_multiple=8)
    for kind in ("gradients", "parameters"):
        for path in [path for path in found[kind] if path.endswith("embedding")]:
            assert found[kind][path].shape == (208, 96)
            assert (found[kind][path][203:] == 0).all()
            found[kind][path] = found[kind][path][:203]
    laws.assert_same_run(found, expected)


def test_the_table_splits_what_it_could_not() -> None:
    for multiple, split in ((1, False), (8, True)):
        with on("tensor 4 x data 2", rules.table()) as mesh:
            model = parameters.abstract_model(ODD, vocab_multiple=multiple)
            placement = parameters.placements(model, mesh, rules.table())["lm_head.embedding"]
        assert (placement.spec[0] == "tensor") is split
        assert any("vocab: none" in fallback for fallback in placement.fallbacks) is not split


def test_logits_and_checkpoints_have_the_true_size(tmp_path) -> None:
    with on("tensor 4 x data 2", rules.table()) as mesh:
        model = parameters.build_model(ODD, mesh, rules.table(), vocab_multiple=8)
        plain = parameters.build_model(ODD, mesh, rules.table())
        hidden = jax.device_put(jnp.ones((2, 4, 96)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        np.testing.assert_allclose(model.logits(hidden), plain.logits(hidden), atol=1e-6)
        assert model.logits(hidden).shape == (2, 4, 203)
        hf.save(model, tmp_path / "out")
        hf.save(plain, tmp_path / "plain")
        written, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "plain"))
        assert {name: x.shape for name, x in written.items()} == {name: x.shape for name, x in expected.items()}
        assert all((written[name] == x).all() for name, x in expected.items())
        again = hf.load(type(model), tmp_path / "out", mesh=mesh, rules=rules.table(), vocab_multiple=8)
        for path, x in parameters.split(model)[1].items():
            np.testing.assert_array_equal(parameters.split(again)[1][path], x)


def test_the_vocabulary_parallel_loss_gathers_no_logits() -> None:
    """Over `tensor` only numbers of one a token are reduced: no collective has an axis as long as the vocabulary."""
    program = compiled_step("data 2 x sequence 2 x tensor 2", "none")
    by_kind = [(kind, shape) for shape, kind in COLLECTIVE.findall(program)]
    assert by_kind
    for kind, shape in by_kind:
        tokens = any(str(2048 // parts) in shape for parts in (1, 2))
        assert not (tokens and ("104" in shape or "52" in shape)), f"{kind} of logits: {shape}"


def test_no_sampled_token_is_one_that_fills_up() -> None:
    model = parameters.merge(*_one_device(vocab_multiple=64))
    arrays = packed_arrays(rows=2, length=16, vocab=203)
    logits = model.logits(model(Batch(**{name: jnp.asarray(x) for name, x in arrays.items()})).hidden)
    assert logits.shape[-1] == 203


def _one_device(**options):
    from flax import nnx

    return parameters.split(ODD.build(rngs=nnx.Rngs(0), **options))
