"""Vision towers on packed patches: transformers' numbers and gradients, one picture never in another, any mesh."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from models.vision import patches
from models.vision.qwen2_5_vl import Qwen2_5VLVision, Qwen2_5VLVisionConfig
from models.vision.qwen2_vl import Qwen2VLVision, Qwen2VLVisionConfig
from models.vision.qwen3_vl import Qwen3VLVision, Qwen3VLVisionConfig
from omnijax import hf, parameters
from omnijax.batch import Media
from omnijax.errors import UserError
from sharding_rules import vision_tower
from tests.laws import GOLDEN
from tests.meshes import on

FAMILIES = {"qwen2_vl": Qwen2VLVision, "qwen2_5_vl": Qwen2_5VLVision, "qwen3_vl": Qwen3VLVision}
SIZES = {"depth": 3, "num_heads": 4, "patch_size": 2, "in_channels": 3, "temporal_patch_size": 2}
TINY = {
    "qwen2_vl": Qwen2VLVisionConfig(**SIZES, embed_dim=32, hidden_size=24, mlp_ratio=2),
    "qwen2_5_vl": Qwen2_5VLVisionConfig(
        **SIZES, hidden_size=32, intermediate_size=40, out_hidden_size=24, window_size=8, fullatt_block_indexes=(1,)
    ),
    "qwen3_vl": Qwen3VLVisionConfig(
        **SIZES,
        hidden_size=32,
        intermediate_size=40,
        out_hidden_size=24,
        num_position_embeddings=25,
        deepstack_visual_indexes=(0, 2),
    ),
}


def outputs(model, media) -> jax.Array:
    """Tokens, and behind them, where the tower has them, the features of each level: [1 + levels, B, M, out]."""
    if not hasattr(model, "with_deepstack"):
        return model(media)[None]
    tokens, features = model.with_deepstack(media)
    return jnp.concatenate([tokens[None], features])


def packed(config, pixels, grids, *, padding: int = 0) -> tuple[Media, np.ndarray]:
    """Items in merge order as one row in their tower's order, and where in merge order each merged token stands."""
    window, merge = getattr(config, "window", None), config.spatial_merge_size
    positions = [patches.merge_positions(grid, merge) for grid in grids]
    order, count = [], 0
    for place in positions:
        own = np.arange(len(place)) if window is None else patches.window_order(place, window)
        order.append(own + count)
        count += len(place)
    order = np.concatenate(order)

    def row(x: np.ndarray) -> jax.Array:
        return jnp.asarray(np.pad(x[order], ((0, padding), *((0, 0),) * (x.ndim - 1))))[None]

    lengths = [len(place) for place in positions]
    segments = np.repeat(np.arange(1, len(grids) + 1, dtype=np.int32), lengths)
    valid = np.full(count, pixels.shape[-1], np.int32)
    grid = np.repeat(np.asarray(grids, np.int32), lengths, axis=0)
    media = Media(row(pixels), row(segments), row(np.concatenate(positions)), row(grid), row(valid))
    return media, order[:: merge**2] // merge**2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_gives_transformers_tokens_and_gradients(family):
    """Two pictures and a clip in one row, padded; the tolerances are those of the reference cases."""
    folder = GOLDEN / family / "vision"
    reference = dict(np.load(folder / "packed.npz"))
    model = hf.load(FAMILIES[family], folder)
    grids = reference["in/grid_thw"].tolist()
    media, order = packed(model.config, reference["in/pixel_values"], grids, padding=8)
    graphdef, params = parameters.split(model)
    cotangent, expected = reference["in/cotangent"][None, order], reference["out/embeds"][None, order]
    if "out/deepstack" in reference:
        cotangent = np.concatenate([cotangent, reference["in/cotangent_deepstack"][:, order]])
        expected = np.concatenate([expected, reference["out/deepstack"][:, order]])

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        embeds = outputs(parameters.merge(graphdef, params), media)[:, 0, : len(order)]
        return (embeds * cotangent).sum(), embeds

    (_, embeds), gradients = jax.jit(loss)(params)
    assert embeds.shape == expected.shape
    for level, x in enumerate(expected):
        assert np.abs(embeds[level] - x).max() <= 5e-5 * np.abs(x).max()
    found = dict(hf.tensors(model, gradients))
    names = {name.removeprefix("grad/") for name in reference if name.startswith("grad/")}
    assert found.keys() == names
    for name in names:
        expected = reference[f"grad/{name}"]
        assert np.abs(found[name] - expected).max() <= 2e-4 * np.abs(expected).max(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_reads_what_it_writes(family, tmp_path):
    model = hf.load(FAMILIES[family], GOLDEN / family / "vision")
    hf.save(model, tmp_path)
    again = hf.load(FAMILIES[family], tmp_path)
    assert again.config == model.config
    for path, x in parameters.split(model)[1].items():
        np.testing.assert_array_equal(parameters.split(again)[1][path], x, err_msg=path)


@pytest.mark.parametrize("number", range(len(Qwen3VLVision.HF_OTHER_NAMES)))
def test_the_tower_of_qwen3_vl_reads_as_qwen3_omni_names_it(number, tmp_path):
    model = hf.load(Qwen3VLVision, GOLDEN / "qwen3_vl" / "vision")
    params = parameters.split(model)[1]
    named = hf.tensors(model, params, Qwen3VLVision.HF_OTHER_NAMES[number])
    save_file({name: np.ascontiguousarray(x) for name, x in named}, tmp_path / "model.safetensors")
    vision = {**model.config.to_hf(), "model_type": "qwen3_omni_moe_vision_encoder", "image_size": 80}
    (tmp_path / "config.json").write_text(json.dumps({"thinker_config": {"vision_config": vision}}))
    again = hf.load(Qwen3VLVision, tmp_path)
    assert again.config == model.config
    for path, x in parameters.split(again)[1].items():
        np.testing.assert_array_equal(params[path], x, err_msg=path)


@pytest.mark.parametrize("family", TINY)
def test_a_picture_in_a_row_is_as_alone(family):
    """Also where both are of one document, which has one number for all its pictures."""
    config, grids = TINY[family], [(1, 6, 10), (2, 4, 6)]
    graphdef, params = parameters.split(config.build(rngs=nnx.Rngs(1)))

    @jax.jit
    def model(media):
        return jnp.concatenate(outputs(parameters.merge(graphdef, params), media), axis=-1)

    counts = [int(np.prod(grid)) for grid in grids]
    pixels = np.random.default_rng(2).standard_normal((sum(counts), 24), dtype=np.float32)
    media, _ = packed(config, pixels, grids)
    one_document = Media(media.features, media.unit_segments * 0 + 1, *jax.tree.leaves(media)[2:])
    first = counts[0] // 4
    together = model(one_document)
    np.testing.assert_array_equal(together, model(media))
    start = 0
    for grid, count in zip(grids, counts, strict=True):
        alone = model(packed(config, pixels[start : start + count], [grid])[0])[0]
        part = together[0, start // 4 : (start + count) // 4]
        np.testing.assert_allclose(part, alone, atol=2e-6 * np.abs(alone).max())
        start += count

    def reach(features):
        return (model(Media(features, *jax.tree.leaves(one_document)[1:]))[0, :first] ** 2).sum()

    gradient = np.asarray(jax.jit(jax.grad(reach))(media.features))[0]
    assert (gradient[: counts[0]] != 0).all(-1).all()
    assert (gradient[counts[0] :] == 0).all()


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_any_mesh_gives_the_tokens_and_gradients_of_one_device(family, attention):
    config, rules = TINY[family], vision_tower.table(attention)
    random = np.random.default_rng(3)
    rows = []
    for grids in ([(1, 6, 8), (2, 4, 4)], [(1, 4, 6), (1, 8, 6)]):
        count = sum(int(np.prod(grid)) for grid in grids)
        pixels = random.standard_normal((count, 24), dtype=np.float32)
        rows.append(packed(config, pixels, grids, padding=96 - count)[0])
    media = jax.tree.map(lambda *xs: jnp.concatenate(xs), *rows)
    cotangent = jnp.asarray(random.standard_normal((3, 2, 24, 24), dtype=np.float32))
    found = []
    for mesh_name in (None, "data 2 x sequence 2 x tensor 2"):
        with on(mesh_name, rules) as mesh:
            graphdef, params = parameters.split(parameters.build_model(config, mesh, rules, seed=4))

            @functools.partial(jax.jit, static_argnums=0)
            @functools.partial(jax.value_and_grad, argnums=1, has_aux=True)
            def loss(graphdef, params, media):
                tokens = outputs(parameters.merge(graphdef, params), media)
                return (tokens * cotangent[: len(tokens)]).sum(), tokens

            (_, tokens), gradients = jax.device_get(loss(graphdef, params, media))
            found.append({"tokens": tokens} | gradients)
    for name, expected in found[0].items():
        error = np.abs(found[1][name] - expected).max() / np.abs(expected).max()
        assert error <= 1e-5, f"{name}: {error:.2e}"


def test_patches_stand_in_merge_order():
    """By hand: pixel values are their own addresses, frame * 10000 + row * 100 + column."""
    frame, row, column = np.indices((3, 4, 8))
    clip = (frame * 10000 + row * 100 + column)[..., None].astype(np.float32)
    units, grid = patches.patchify(clip, patch=1, merge=2, temporal=2)
    assert grid == (2, 4, 8)
    assert units[:6].tolist() == [[0, 10000], [1, 10001], [100, 10100], [101, 10101], [2, 10002], [3, 10003]]
    assert units[32].tolist() == [20000, 20000]  # the last frame stands twice
    place = patches.merge_positions(grid, 2)
    np.testing.assert_array_equal(units[:, 0], place[:, 0] * 20000 + place[:, 1] * 100 + place[:, 2])


def test_a_config_reads_as_the_hub_and_as_transformers_spell_it():
    hub = {"in_chans": 3, "spatial_patch_size": 14, "hidden_act": "silu", "tokens_per_second": 4, "depth": 40}
    new = {"in_channels": 3, "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}, "depth": 40}
    expected = Qwen2_5VLVisionConfig(depth=40)
    old = {"rope_scaling": {"rope_type": "axial"}, "rope_theta": 10000.0, "depth": 40}
    for values in (hub, new, old, {"model_type": "qwen2_5_vl", "vision_config": hub}):
        assert Qwen2_5VLVisionConfig.from_hf(values) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "must be of type axial"),
        ({"stride": 3}, "unknown key 'stride'"),
        ({"num_heads": 7}, "multiple of 4 x 7 heads"),
        ({"window_size": 8}, "window_size = 8"),
        ({"fullatt_block_indexes": [40]}, "[40] is not in 0..31"),
        ({"model_type": "siglip"}, "'siglip' is none of"),
    ],
)
def test_a_config_that_is_not_this_family_is_one_line(values, message):
    with pytest.raises(UserError) as caught:
        Qwen2_5VLVisionConfig.from_hf(values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_position_embeddings": 2300}, "num_position_embeddings = 2300 must be a square"),
        ({"deepstack_visual_indexes": []}, "deepstack_visual_indexes = [] must be layers of 0..26"),
        ({"deepstack_visual_indexes": [8, 27]}, "[8, 27] must be layers of 0..26"),
        ({"deepstack_visual_indexes": [16, 8]}, "each larger than the one before"),
    ],
)
def test_positions_and_deepstack_that_cannot_be_are_one_line(values, message):
    with pytest.raises(UserError) as caught:
        Qwen3VLVisionConfig.from_hf(values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
