"""Vision-language families: transformers' numbers, the laws, and rows with every mix of modalities in one program."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from models.qwen2_5_vl import Qwen2_5VLConfig, Qwen2_5VLTextConfig
from models.qwen2_vl import Qwen2VLConfig, Qwen2VLTextConfig
from models.qwen3_vl import Qwen3VLConfig, Qwen3VLMoeConfig, Qwen3VLMoeTextConfig, Qwen3VLTextConfig
from models.vision.qwen2_5_vl import Qwen2_5VLVisionConfig
from models.vision.qwen2_vl import Qwen2VLVisionConfig
from models.vision.qwen3_vl import Qwen3VLVisionConfig
from omnijax import hf, parameters
from omnijax.errors import UserError
from omnijax.nn.rope import MultimodalRope
from sharding_rules import qwen2_5_vl, qwen2_vl, qwen3_vl, qwen3_vl_moe
from tests import laws
from tests.laws import GOLDEN
from tests.meshes import arrays_of

CASES = {"qwen2_vl": "img_video", "qwen2_5_vl": "tied", "qwen3_vl": "tied", "qwen3_vl_moe": "img_video"}
TOWER = {"depth": 2, "num_heads": 4, "patch_size": 2, "in_channels": 3, "temporal_patch_size": 2}
TEXT = {
    "vocab_size": 208,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "initializer_range": 0.05,
    "rope_scaling": MultimodalRope((2, 1, 3)),
}
IDS = {"image_token_id": 200, "video_token_id": 201, "vision_start_token_id": 202, "vision_end_token_id": 203}
TINY = {
    "qwen2_vl": Qwen2VLConfig(
        Qwen2VLTextConfig(**TEXT), Qwen2VLVisionConfig(**TOWER, embed_dim=32, hidden_size=96, mlp_ratio=2), **IDS
    ),
    "qwen2_5_vl": Qwen2_5VLConfig(
        Qwen2_5VLTextConfig(**TEXT),
        Qwen2_5VLVisionConfig(
            **TOWER,
            hidden_size=32,
            intermediate_size=40,
            out_hidden_size=96,
            window_size=8,
            fullatt_block_indexes=(1,),
        ),
        **IDS,
    ),
}
QWEN3_TEXT = TEXT | {"head_dim": 20, "rope_scaling": MultimodalRope((4, 3, 3), mrope_interleaved=True)}
QWEN3_TOWER = Qwen3VLVisionConfig(
    **TOWER | {"depth": 3},
    hidden_size=32,
    intermediate_size=40,
    out_hidden_size=96,
    num_position_embeddings=25,
    deepstack_visual_indexes=(0, 2),
)
TINY |= {
    "qwen3_vl": Qwen3VLConfig(Qwen3VLTextConfig(**QWEN3_TEXT), QWEN3_TOWER, **IDS),
    "qwen3_vl_moe": Qwen3VLMoeConfig(
        Qwen3VLMoeTextConfig(**QWEN3_TEXT, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2),
        QWEN3_TOWER,
        **IDS,
    ),
}
TABLES = {"qwen2_vl": qwen2_vl, "qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl, "qwen3_vl_moe": qwen3_vl_moe}

# Grids of the pictures and clips of each document of each row; a clip has more than one frame.
LENGTH = 64
ROWS = (
    (((1, 6, 8),), (), ((2, 4, 4), (1, 4, 6))),
    ((), ()),
    (((1, 8, 6),),),
    (((3, 4, 4),), ((1, 4, 4),)),
)


def documents(row, random, run_each_frame: bool) -> list[np.ndarray]:
    """The tokens of each document: text, and a run of placeholders for each grid, or each frame of it."""
    found = []
    for grids in row:
        parts = [random.integers(0, 200, 3)]
        for grid in grids:
            token = IDS["image_token_id" if grid[0] == 1 else "video_token_id"]
            runs = grid[0] if run_each_frame else 1
            for _ in range(runs):
                parts += [[202], [token] * (int(np.prod(grid)) // 4 // runs), [203], random.integers(0, 200, 2)]
        found.append(np.concatenate(parts))
    return found


def inputs_of(rows, family: str, *, length: int = LENGTH, seed: int = 0) -> dict[str, np.ndarray]:
    """As a transformers processor gives them, packed."""
    random = np.random.default_rng(seed)
    tokens, segments = np.zeros((len(rows), length), np.int64), np.zeros((len(rows), length), np.int64)
    for number, row in enumerate(rows):
        found = documents(row, random, family.startswith("qwen3"))
        packed = np.concatenate(found)
        tokens[number, : len(packed)] = packed
        segments[number, : len(packed)] = np.repeat(np.arange(1, len(found) + 1), [len(each) for each in found])
    grids = [grid for row in rows for document in row for grid in document]
    inputs = {"input_ids": tokens, "labels": np.where((segments > 0) & (tokens < 200), tokens, -100)}
    for clip, pixels, name in (
        (False, "pixel_values", "image_grid_thw"),
        (True, "pixel_values_videos", "video_grid_thw"),
    ):
        own = [grid for grid in grids if (grid[0] > 1) == clip]
        inputs[name] = np.array(own, np.int64).reshape(-1, 3)
        inputs[pixels] = random.standard_normal((int(inputs[name].prod(1).sum()), 24)).astype(np.float32)
    return inputs | {"segment_ids": segments}


@functools.cache
def mixed_arrays(family: str) -> dict[str, np.ndarray]:
    """Eight rows: pictures, clips, both, neither; in some rows documents with and without."""
    abstract = parameters.abstract_model(TINY[family])
    return arrays_of(hf.to_batch(abstract, inputs_of(ROWS * 2, family)), units=128)


@functools.cache
def one_device(family: str) -> dict:
    return laws.run(TINY[family], TABLES[family].table(), None, arrays=mixed_arrays(family))


@pytest.mark.parametrize("batch", ["padded", "packed"])
@pytest.mark.parametrize("family", CASES)
def test_parity(family, batch):
    laws.parity(GOLDEN / family / CASES[family], batch)


@pytest.mark.parametrize("family", CASES)
def test_positions_are_those_of_transformers(family):
    case = GOLDEN / family / CASES[family]
    reference = dict(np.load(case / "padded.npz"))
    inputs = {name[3:]: x for name, x in reference.items() if name.startswith("in/")}
    expected, valid = inputs.pop("mrope_position_ids"), inputs.pop("valid_mask")
    model = parameters.abstract_model(
        models.family_of(case).Config.from_hf(json.loads((case / "config.json").read_text()))
    )
    batch = hf.to_batch(model, inputs)
    np.testing.assert_array_equal(np.asarray(batch.positions)[valid], expected.transpose(1, 2, 0)[valid])


@pytest.mark.parametrize("spelling", ["config.json", "config_hub_style.json"])
@pytest.mark.parametrize("family", CASES)
def test_weights_go_out_as_they_came(family, spelling, tmp_path):
    case = GOLDEN / family / CASES[family]
    config = models.family_of(case).Config.from_hf(json.loads((case / spelling).read_text()))
    model = hf.load(models.family_of(case), case)
    assert config == model.config
    hf.save(model, tmp_path)
    again = hf.load(models.family_of(tmp_path), tmp_path)
    assert again.config == config
    assert (tmp_path / "model.safetensors").stat().st_size > 0
    theirs, ours = (dict(hf.tensors(m, parameters.split(m)[1])) for m in (model, again))
    assert theirs.keys() == ours.keys()
    for name, x in theirs.items():
        np.testing.assert_array_equal(ours[name], x, err_msg=name)


@pytest.mark.parametrize("inner", [None, True, False])
@pytest.mark.parametrize("outer", [None, True, False])
def test_the_text_model_says_whether_the_head_is_tied(inner, outer):
    values = TINY["qwen2_5_vl"].to_hf()
    del values["tie_word_embeddings"], values["text_config"]["tie_word_embeddings"]
    if inner is not None:
        values["text_config"]["tie_word_embeddings"] = inner
    if outer is not None:
        values["tie_word_embeddings"] = outer
    said = [each for each in (inner, outer) if each is not None]
    assert Qwen2_5VLConfig.from_hf(values).tie_word_embeddings == (said[0] if said else False)


MESHES = {
    "data 2 x sequence 2 x tensor 2": ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
    "expert 2 x sequence 2 x data 2": ("qwen3_vl_moe",),
    "data 8": (),
    "sequence 4 x data 2": (),
}
LAWFUL = [
    pytest.param(family, attention, mesh, marks=() if family in often and attention == "ulysses" else pytest.mark.full)
    for family in TINY
    for attention in ("ulysses", "ring")
    for mesh, often in MESHES.items()
]


@pytest.mark.parametrize(("family", "attention", "mesh"), LAWFUL)
def test_equivalence(family, attention, mesh):
    rules = TABLES[family].table(attention)
    laws.equivalence(TINY[family], rules, mesh, one_device(family), arrays=mixed_arrays(family))


def test_accumulation_changes_nothing():
    arrays = mixed_arrays("qwen2_vl")
    found = laws.run(TINY["qwen2_vl"], qwen2_vl.table(), None, arrays=arrays, accumulation=4)
    laws.assert_same_run(found, one_device("qwen2_vl"))


@pytest.mark.parametrize("family", TINY)
def test_a_document_in_a_row_is_as_alone(family):
    """Positions, hidden states, and no gradient of one document's patches from another's tokens."""
    config = TINY[family]
    graphdef, params = parameters.split(config.build(rngs=nnx.Rngs(1)))
    row = ROWS[0]
    inputs = inputs_of((row,), family)
    batch = hf.to_batch(parameters.merge(graphdef, params), inputs)

    @jax.jit
    def hidden(batch):
        return parameters.merge(graphdef, params)(batch).hidden

    together = hidden(batch)[0]
    used = {"image": 0, "video": 0}
    keys = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
    for number, grids in enumerate(row, 1):
        (places,) = np.nonzero(inputs["segment_ids"][0] == number)
        own = {name: inputs[name][:, places] for name in ("input_ids", "labels")}
        for clip, (kind, (pixels, name)) in enumerate(keys.items()):
            mine = [grid for grid in grids if (grid[0] > 1) == bool(clip)]
            count = sum(int(np.prod(grid)) for grid in mine)
            own[pixels] = inputs[pixels][used[kind] : used[kind] + count]
            own[name] = np.array(mine, np.int64).reshape(-1, 3)
            used[kind] += count
        alone = hf.to_batch(parameters.merge(graphdef, params), own)
        np.testing.assert_array_equal(np.asarray(batch.positions)[0, places], alone.positions[0])
        np.testing.assert_allclose(together[places], hidden(alone)[0], atol=3e-6 * np.abs(together).max())

    def reach(features):
        media = {"image": dataclasses.replace(batch.media["image"], features=features)}
        return (hidden(dataclasses.replace(batch, media=media))[0] * (batch.segment_ids[0] == 3)[:, None]).sum()

    gradient = np.asarray(jax.grad(reach)(batch.media["image"].features))[0]
    of = np.asarray(batch.media["image"].unit_segments)[0]
    assert (gradient[of == 3] != 0).any(-1).all()
    assert (gradient[of != 3] == 0).all()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_every_mix_of_modalities_runs_in_one_program_and_absent_ones_add_nothing(family):
    """All-padding media give the loss and gradients of a batch without any, and no gradient to the tower."""
    config = TINY[family]
    graphdef, params = parameters.split(config.build(rngs=nnx.Rngs(2)))
    model = parameters.merge(graphdef, params)

    @jax.jit
    def step(params, batch):
        def loss(params):
            total, weight = parameters.merge(graphdef, params)(batch).objectives["text"]
            return total / jnp.maximum(weight, 1)

        return jax.value_and_grad(loss)(params)

    def batch(rows):
        found = hf.to_batch(model, inputs_of(rows, family))
        units = 128 - found.media["image"].features.shape[1]
        padded = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, units), *((0, 0),) * (x.ndim - 2))), found.media)
        return dataclasses.replace(found, media=padded)

    mixes = {"text": ((), ()), "image": (((1, 4, 4),),), "video": (((2, 4, 4),),), "both": ROWS[0]}
    for name, row in mixes.items():
        value, gradients = step(params, batch((row,)))
        tower = {path: x for path, x in gradients.items() if path.startswith("encoders.")}
        assert np.isfinite(value)
        if name == "text":
            assert all((x == 0).all() for x in tower.values())
            bare = dataclasses.replace(batch((row,)), media={}, slots={})
            expected, without = step(params, bare)
            np.testing.assert_allclose(value, expected, rtol=1e-6)
            for path, x in without.items():
                np.testing.assert_allclose(gradients[path], x, atol=1e-6 * max(np.abs(x).max(), 1e-9), err_msg=path)
        else:
            assert all((x != 0).any() for x in tower.values()), name
    nothing = dataclasses.replace(batch((mixes["text"],)), weights=jnp.zeros((1, LENGTH)))
    value, gradients = step(params, nothing)
    assert value == 0
    assert all((x == 0).all() for x in gradients.values())
    assert step._cache_size() == 2  # with media, and the one without


def test_inputs_that_do_not_fit_are_refused():
    model = parameters.abstract_model(TINY["qwen2_vl"])
    inputs = inputs_of((ROWS[0],), "qwen2_vl")
    for change, message in (
        ({"pixel_values": inputs["pixel_values"][:-4]}, "its grids have"),
        ({"image_grid_thw": inputs["image_grid_thw"][::-1]}, "placeholder tokens"),
        ({"image_grid_thw": inputs["image_grid_thw"][:1], "pixel_values": inputs["pixel_values"][:48]}, "placeholder"),
        ({"input_ids": np.where(inputs["input_ids"] == 201, 5, inputs["input_ids"])}, "stand for 0"),
        ({"input_features": np.zeros(3)}, "does not read input_features"),
    ):
        with pytest.raises(UserError, match=message):
            hf.to_batch(model, inputs | change)
    with pytest.raises(UserError, match="width 40, the text model has 96"):
        dataclasses.replace(
            TINY["qwen2_vl"], vision_config=dataclasses.replace(TINY["qwen2_vl"].vision_config, hidden_size=40)
        )
    text = dataclasses.replace(TINY["qwen2_vl"].text_config, rope_scaling=MultimodalRope((2, 2, 3)))
    wrong = dataclasses.replace(TINY["qwen2_vl"], text_config=text)
    with pytest.raises(UserError, match="sum to 6 pairs"):
        parameters.abstract_model(wrong)
