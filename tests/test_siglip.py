"""SigLIP's vision tower on packed patches: transformers' numbers and gradients, its checkpoints, any mesh."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from models.vision import patches
from models.vision.siglip import SigLIPVision, SigLIPVisionConfig
from omnijax import hf, parameters
from omnijax.batch import Media
from omnijax.errors import UserError
from sharding_rules import vision_tower
from tests.laws import GOLDEN
from tests.meshes import on

CASE = GOLDEN / "siglip" / "vision"
TINY = SigLIPVisionConfig(
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=8,
    patch_size=2,
)


def packed(patch: int, pictures, *, padding: int = 0) -> Media:
    """Pictures `[H, W, 3]` of any sizes as one padded row of one document."""
    units, grids = zip(*(patches.patchify(x[None], patch, 1, 1) for x in pictures), strict=True)
    lengths = [len(x) for x in units]

    def row(arrays) -> jax.Array:
        x = np.concatenate(arrays)
        return jnp.asarray(np.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1))))[None]

    grid = row([np.tile(np.int32(grid), (length, 1)) for grid, length in zip(grids, lengths, strict=True)])
    positions = row([patches.merge_positions(grid, 1) for grid in grids])
    ones = row([np.ones(length, np.int32) for length in lengths])
    return Media(row(units), ones, positions, grid, ones * units[0].shape[1])


def random_pictures(seed: int, sizes) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal((*size, 3), dtype=np.float32) for size in sizes]


def test_the_tower_gives_transformers_tokens_and_gradients():
    """Pictures of the tower's own size, and wide ones, for which transformers interpolates the positions."""
    reference = dict(np.load(CASE / "packed.npz"))
    model = hf.load(SigLIPVision, CASE)
    kinds = ("square", "wide")
    pictures = [x for kind in kinds for x in reference[f"in/{kind}"].transpose(0, 2, 3, 1)]
    media = packed(model.config.patch_size, pictures, padding=6)
    width = model.config.hidden_size
    cotangent, expected = (
        np.concatenate([reference[name + kind].reshape(-1, width) for kind in kinds])
        for name in ("in/cotangent_", "out/")
    )
    graphdef, params = parameters.split(model)

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        tokens = parameters.merge(graphdef, params)(media)[0, :-6]
        return (tokens * cotangent).sum(), tokens

    (_, tokens), gradients = jax.jit(loss)(params)
    assert np.abs(tokens - expected).max() <= 5e-5 * np.abs(expected).max()
    found = {f"grad/{name}": x for name, x in hf.tensors(model, gradients)}
    assert found.keys() == {name for name in reference if name.startswith("grad/")}
    for name, x in found.items():
        scale = np.abs(reference[name]).max()
        if name.endswith("k_proj.bias"):  # no sum depends on it: what there is, is rounding
            scale = np.abs(reference[name.replace("k_proj", "q_proj")]).max()
        assert np.abs(x - reference[name]).max() <= 2e-4 * scale, name


def test_the_tower_reads_what_it_writes(tmp_path):
    model = hf.load(SigLIPVision, CASE)
    hf.save(model, tmp_path)
    again = hf.load(SigLIPVision, tmp_path)
    assert again.config == model.config
    for path, x in parameters.split(model)[1].items():
        np.testing.assert_array_equal(parameters.split(again)[1][path], x, err_msg=path)


@pytest.mark.parametrize("number", range(len(SigLIPVision.HF_OTHER_NAMES)))
def test_the_tower_reads_other_spellings_and_leaves_other_parts(number, tmp_path):
    """Without a prefix, and as Janus has it, whose config differs too."""
    model = hf.load(SigLIPVision, CASE)
    params = parameters.split(model)[1]
    named = hf.tensors(model, params, SigLIPVision.HF_OTHER_NAMES[number])
    tensors = {name: np.ascontiguousarray(x) for name, x in named}
    others = ("head.probe", "model.aligner.fc1.bias", "model.vqmodel.encoder.conv_in.bias", "text_model.encoder.bias")
    save_file(tensors | {name: np.zeros(3, np.float32) for name in others}, tmp_path / "model.safetensors")
    values = {key: x for key, x in model.config.to_hf().items() if key not in ("intermediate_size", "vision_use_head")}
    janus = {"model_type": "janus_vision_model", "mlp_ratio": 1.39, "depth": 2, "use_qk_norm": False}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "janus", "vision_config": values | janus}))
    again = hf.load(SigLIPVision, tmp_path)
    assert again.config == model.config
    for path, x in parameters.split(again)[1].items():
        np.testing.assert_array_equal(params[path], x, err_msg=path)


def test_a_picture_in_a_row_is_as_alone():
    pictures = random_pictures(2, [(8, 8), (6, 10)])
    graphdef, params = parameters.split(TINY.build(rngs=nnx.Rngs(1)))

    @jax.jit
    def model(media):
        return parameters.merge(graphdef, params)(media)

    media, first = packed(2, pictures), 16
    together = model(media)[0]
    for part, picture in zip((together[:first], together[first:]), pictures, strict=True):
        alone = model(packed(2, [picture]))[0]
        np.testing.assert_allclose(part, alone, atol=2e-6 * np.abs(alone).max())

    def reach(features):
        return (model(Media(features, *jax.tree.leaves(media)[1:]))[0, :first, 3] ** 2).sum()

    gradient = np.asarray(jax.jit(jax.grad(reach))(media.features))[0]
    assert (gradient[:first] != 0).all(-1).all()
    assert (gradient[first:] == 0).all()


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_any_mesh_gives_the_tokens_and_gradients_of_one_device(attention):
    rules, sizes = vision_tower.table(attention), ([(8, 8), (6, 10)], [(8, 8), (8, 4)])
    rows = [
        packed(2, random_pictures(seed, row), padding=40 - sum(h * w // 4 for h, w in row))
        for seed, row in enumerate(sizes)
    ]
    media = jax.tree.map(lambda *xs: jnp.concatenate(xs), *rows)
    cotangent = jnp.asarray(np.random.default_rng(3).standard_normal((2, 40, 32), dtype=np.float32))
    found = []
    for mesh_name in (None, "data 2 x sequence 2 x tensor 2"):
        with on(mesh_name, rules) as mesh:
            graphdef, params = parameters.split(parameters.build_model(TINY, mesh, rules, seed=4))

            @functools.partial(jax.jit, static_argnums=0)
            @functools.partial(jax.value_and_grad, argnums=1, has_aux=True)
            def loss(graphdef, params, media):
                tokens = parameters.merge(graphdef, params)(media)
                return (tokens * cotangent).sum(), tokens

            (_, tokens), gradients = jax.device_get(loss(graphdef, params, media))
            found.append({"tokens": tokens} | gradients)
    for name, expected in found[0].items():
        error = np.abs(found[1][name] - expected).max() / np.abs(expected).max()
        assert error <= 1e-5, f"{name}: {error:.2e}"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act = 'relu' is none of gelu_pytorch_tanh, gelu"),
        ({"num_attention_heads": 7}, "multiple of num_attention_heads = 7"),
        ({"patch_size": 300}, "patch_size = 300 must be of 1..image_size = 224"),
        ({"use_qk_norm": True}, "use_qk_norm = True must be False"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1 must be 0.0"),
        ({"model_type": "clip_vision_model"}, "'clip_vision_model' is none of"),
    ],
)
def test_a_config_that_is_not_this_family_is_one_line(values, message):
    with pytest.raises(UserError) as caught:
        SigLIPVisionConfig.from_hf(values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
