"""Qwen's omni thinkers: transformers' numbers, the laws, sound inside clips, and every mix in one program."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import models
from models.audio.qwen2_5_omni import Qwen2_5OmniAudioConfig
from models.audio.qwen3_omni import Qwen3OmniAudioConfig
from models.qwen2_5_omni import Qwen2_5OmniConfig, Qwen2_5OmniTextConfig, Qwen2_5OmniVisionConfig
from models.qwen3_omni import Qwen3OmniConfig, Qwen3OmniTextConfig, Qwen3OmniVisionConfig
from models.thinker_positions import Timing
from omnijax import hf, parameters
from omnijax.errors import UserError
from omnijax.nn.rope import MultimodalRope
from sharding_rules import qwen2_5_omni, qwen3_omni
from tests import laws
from tests.laws import GOLDEN
from tests.meshes import arrays_of

CASE = "text_image_audio_video"
FAMILIES = ("qwen2_5_omni", "qwen3_omni_moe")
IMAGE, VIDEO, AUDIO, SOUND, SOUND_ENDS, VISION, VISION_ENDS = range(200, 207)
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "audio_token_id": AUDIO,
    "audio_start_token_id": SOUND,
    "audio_end_token_id": SOUND_ENDS,
    "vision_start_token_id": VISION,
    "vision_end_token_id": VISION_ENDS,
    "position_id_per_seconds": 4,
}
TEXT = {
    "vocab_size": 208,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "initializer_range": 0.05,
}
TOWER = {"num_heads": 4, "patch_size": 2, "hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 96}
EAR = {
    "num_mel_bins": 10,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 56,
    "d_model": 48,
    "max_source_positions": 16,
    "output_dim": 96,
}
TINY = {
    "qwen2_5_omni": Qwen2_5OmniConfig(
        text_config=Qwen2_5OmniTextConfig(**TEXT, rope_scaling=MultimodalRope((2, 1, 3))),
        vision_config=Qwen2_5OmniVisionConfig(**TOWER, depth=2, window_size=8, fullatt_block_indexes=(1,)),
        audio_config=Qwen2_5OmniAudioConfig(**EAR, n_window=8),
        seconds_per_chunk=1,
        **IDS,
    ),
    "qwen3_omni_moe": Qwen3OmniConfig(
        text_config=Qwen3OmniTextConfig(
            **TEXT,
            head_dim=20,
            rope_scaling=MultimodalRope((4, 3, 3), mrope_interleaved=True),
            moe_intermediate_size=24,
            num_experts=8,
            num_experts_per_tok=2,
        ),
        vision_config=Qwen3OmniVisionConfig(
            **TOWER, depth=2, num_position_embeddings=25, deepstack_visual_indexes=(0,)
        ),
        audio_config=Qwen3OmniAudioConfig(**EAR, downsample_hidden_size=8, n_window_infer=200),
        **IDS,
    ),
}
TABLES = {"qwen2_5_omni": qwen2_5_omni, "qwen3_omni_moe": qwen3_omni}

# Of each document of each row: grids, frames of a sound, or both for a clip with its sound in it.
LENGTH = 64
ROWS = (
    (((1, 6, 8), 23), (), (((3, 4, 4), 37),)),
    ((), ()),
    ((90,),),
    (((2, 4, 4), 16), ((1, 4, 4),)),
)


def tokens_of_sound(family: str, frames: int) -> int:
    """By hand."""
    if family == "qwen2_5_omni":
        return -(-frames // 2) // 2
    return frames // 100 * 13 + -(-(frames % 100) // 8)


def run_of(family: str, item) -> list[int]:
    """The placeholder tokens of an item, between those that begin and end it."""
    match item:
        case int():
            return [SOUND, *[AUDIO] * tokens_of_sound(family, item), SOUND_ENDS]
        case (tuple() as grid, int() as frames):
            # Of 3 frames 0.75 s apart, 4 positions a second: at 0, 3 and 6, of 4 tokens each.
            sound = tokens_of_sound(family, frames)
            assert grid == (3, 4, 4)
            assert sound in (5, 9)
            if family == "qwen2_5_omni":  # in stretches of 4 positions, frames first
                inner = [*[VIDEO] * 8, *[AUDIO] * 4, *[VIDEO] * 4, *[AUDIO] * (sound - 4)]
            else:  # each where its time puts it
                inner = [*[VIDEO] * 4, *[AUDIO] * 3, *[VIDEO] * 4, *[AUDIO] * (sound - 3), *[VIDEO] * 4]
            return [VISION, SOUND, *inner, SOUND_ENDS, VISION_ENDS]
        case grid:
            return [VISION, *[IMAGE if grid[0] == 1 else VIDEO] * (int(np.prod(grid)) // 4), VISION_ENDS]


def inputs_of(rows, family: str, *, length: int = LENGTH, seed: int = 0) -> dict[str, np.ndarray]:
    """As a transformers processor gives them, packed."""
    random = np.random.default_rng(seed)
    tokens, segments = np.zeros((2, len(rows), length), np.int64)
    for number, row in enumerate(rows):
        found = []
        for document in row:
            parts = [random.integers(0, 200, 3)]
            for item in document:
                parts += [run_of(family, item), random.integers(0, 200, 2)]
            found.append(np.concatenate(parts))
        packed = np.concatenate(found)
        tokens[number, : len(packed)] = packed
        segments[number, : len(packed)] = np.repeat(np.arange(1, len(found) + 1), [len(each) for each in found])
    items = [item for row in rows for document in row for item in document]
    flat = [part for item in items for part in (item if isinstance(item, tuple) and len(item) == 2 else (item,))]
    sounds = [part for part in flat if isinstance(part, int)]
    inputs = {"input_ids": tokens, "labels": np.where((segments > 0) & (tokens < 200), tokens, -100)}
    for clip, pixels, name in (
        (False, "pixel_values", "image_grid_thw"),
        (True, "pixel_values_videos", "video_grid_thw"),
    ):
        own = [part for part in flat if isinstance(part, tuple) and (part[0] > 1) == clip]
        inputs[name] = np.array(own, np.int64).reshape(-1, 3)
        inputs[pixels] = random.standard_normal((int(inputs[name].prod(1).sum()), 24)).astype(np.float32)
    inputs["video_second_per_grid"] = np.full(len(inputs["video_grid_thw"]), 0.75, np.float32)
    if sounds:
        frames = max(*sounds, 100)
        inputs["feature_attention_mask"] = (np.arange(frames) < np.array(sounds)[:, None]).astype(np.int64)
        inputs["input_features"] = random.standard_normal((len(sounds), 10, frames)).astype(np.float32)
    return inputs | {"segment_ids": segments}


def padded(batch, image: int = 128, audio: int = 8):
    """The same with a fixed number of units in each row."""
    room = {"image": image, "audio": audio}

    def fill(x, units):
        return jnp.pad(x, ((0, 0), (0, units - x.shape[1]), *((0, 0),) * (x.ndim - 2)))

    media = {name: jax.tree.map(lambda x, n=room[name]: fill(x, n), each) for name, each in batch.media.items()}
    return dataclasses.replace(batch, media=media)


@functools.cache
def mixed_arrays(family: str) -> dict[str, np.ndarray]:
    """Eight rows: pictures, clips, sounds, clips with sound, nothing; units enough for any mesh."""
    abstract = parameters.abstract_model(TINY[family])
    return arrays_of(padded(hf.to_batch(abstract, inputs_of(ROWS * 2, family))))


@functools.cache
def one_device(family: str) -> dict:
    return laws.run(TINY[family], TABLES[family].table(), None, arrays=mixed_arrays(family))


@pytest.mark.parametrize("batch", ["padded", "packed", "audio_in_video"])
@pytest.mark.parametrize("family", FAMILIES)
def test_parity(family, batch):
    laws.parity(GOLDEN / family / CASE, batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_of_packed_rows_are_those_of_transformers(family):
    """Counted here, where the reference gives them."""
    case = GOLDEN / family / CASE
    reference = dict(np.load(case / "packed.npz"))
    inputs = {name[3:]: x for name, x in reference.items() if name.startswith("in/")}
    expected, valid = inputs.pop("position_ids"), inputs.pop("valid_mask")
    config = models.family_of(case).Config.from_hf(json.loads((case / "config.json").read_text()))
    batch = hf.to_batch(parameters.abstract_model(config), inputs)
    np.testing.assert_array_equal(np.asarray(batch.positions)[valid], expected[1:].transpose(1, 2, 0)[valid])


@pytest.mark.parametrize("spelling", ["config.json", "config_hub_style.json"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_go_out_as_they_came(family, spelling, tmp_path):
    case = GOLDEN / family / CASE
    config = models.family_of(case).Config.from_hf(json.loads((case / spelling).read_text()))
    model = hf.load(models.family_of(case), case)
    assert config == model.config
    hf.save(model, tmp_path)
    theirs, ours = load_file(case / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert theirs.keys() == ours.keys()
    for name, x in theirs.items():
        np.testing.assert_array_equal(ours[name], x, err_msg=name)
    assert hf.load(models.family_of(tmp_path), tmp_path).config == config


@pytest.mark.parametrize("family", FAMILIES)
def test_of_a_whole_model_the_thinker_is_read(family, tmp_path, caplog):
    case = GOLDEN / family / CASE
    config = json.loads((case / "config_hub_style.json").read_text())
    whole = {"model_type": config["model_type"].removesuffix("_thinker"), "thinker_config": config, "talker_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    weights = {f"thinker.{name}": x for name, x in load_file(case / "model.safetensors").items()}
    save_file(weights | {"talker.model.norm.weight": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    model, alone = (hf.load(models.family_of(folder), folder) for folder in (tmp_path, case))
    assert "1 tensors" in caplog.text
    for path, x in parameters.split(alone)[1].items():
        np.testing.assert_array_equal(parameters.split(model)[1][path], x)


MESHES = {
    "data 2 x sequence 2 x tensor 2": ("qwen2_5_omni",),
    "expert 2 x sequence 2 x data 2": ("qwen3_omni_moe",),
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


@pytest.mark.parametrize("family", TINY)
def test_a_document_in_a_row_is_as_alone(family):
    """Positions, hidden states, and no gradient of one document's media from another's tokens."""
    graphdef, params = parameters.split(TINY[family].build(rngs=nnx.Rngs(1)))
    model, row = parameters.merge(graphdef, params), ROWS[0]
    inputs = inputs_of((row,), family)
    batch = padded(hf.to_batch(model, inputs))

    @jax.jit
    def hidden(batch):
        return parameters.merge(graphdef, params)(batch).hidden

    together = hidden(batch)[0]
    for number in (1, 3):
        (places,) = np.nonzero(inputs["segment_ids"][0] == number)
        own = {name: inputs[name][:, places] for name in ("input_ids", "labels")}
        clips, pictures = ("pixel_values_videos", "video_grid_thw"), ("pixel_values", "image_grid_thw")
        own |= {name: inputs[name] for name in (clips if number == 3 else pictures)}
        own |= {"video_second_per_grid": inputs["video_second_per_grid"][: number == 3]}
        sound = slice(0, 1) if number == 1 else slice(1, 2)
        own |= {name: inputs[name][sound] for name in ("input_features", "feature_attention_mask")}
        alone = padded(hf.to_batch(model, own))
        np.testing.assert_array_equal(np.asarray(batch.positions)[0, places], alone.positions[0])
        np.testing.assert_allclose(together[places], hidden(alone)[0], atol=4e-6 * np.abs(together).max())

    def reach(features):
        media = {name: dataclasses.replace(batch.media[name], features=x) for name, x in features.items()}
        return (hidden(dataclasses.replace(batch, media=media))[0] * (batch.segment_ids[0] == 3)[:, None]).sum()

    gradients = jax.grad(reach)({name: each.features for name, each in batch.media.items()})
    for name, gradient in gradients.items():
        of, x = np.asarray(batch.media[name].unit_segments)[0], np.asarray(gradient)[0]
        x = x.reshape(len(x), -1)
        assert (x[of == 3] != 0).any(-1).all(), name
        assert (x[of != 3] == 0).all(), name


@pytest.mark.parametrize("family", TINY)
def test_every_mix_of_modalities_runs_in_one_program_and_absent_ones_add_nothing(family):
    graphdef, params = parameters.split(TINY[family].build(rngs=nnx.Rngs(2)))
    model = parameters.merge(graphdef, params)

    @jax.jit
    def step(params, batch):
        def loss(params):
            total, weight = parameters.merge(graphdef, params)(batch).objectives["text"]
            return total / jnp.maximum(weight, 1)

        return jax.value_and_grad(loss)(params)

    def batch(rows):
        return padded(hf.to_batch(model, inputs_of(rows, family)))

    mixes = {
        "": ((), ()),
        "image": (((1, 4, 4),),),
        "image clip": (((2, 4, 4),),),
        "audio": ((90, 20),),
        "image audio": ROWS[0],
    }
    unread = ("audio_bos_eos_token", "k_proj.bias")
    for name, row in mixes.items():
        value, gradients = step(params, batch((row,)))
        assert np.isfinite(value)
        for path, x in gradients.items():
            if path.startswith("encoders.") and not path.endswith(unread):
                assert (x != 0).any() == (path.split(".")[1] in name.split()), (name, path)
        if not name:
            expected, without = step(params, dataclasses.replace(batch((row,)), media={}, slots={}))
            np.testing.assert_allclose(value, expected, rtol=1e-6)
            for path, x in without.items():
                np.testing.assert_allclose(gradients[path], x, atol=1e-6 * max(np.abs(x).max(), 1e-9), err_msg=path)
    assert step._cache_size() == 2  # with media, and the one without


def test_time_by_hand():
    """Frames 1.5 s apart: cut to whole positions there, between them here; far frames go one chunk further at most."""
    cut, between = Timing(5, chunk=10), Timing(5)
    np.testing.assert_array_equal(cut.times(4, 1.5), [0, 7, 15, 22])
    np.testing.assert_array_equal(between.times(4, 1.5), [0, 7.5, 15, 22.5])
    np.testing.assert_array_equal(cut.order(np.float32([0, 7, 15, 22])), [0, 0, 1, 2])
    np.testing.assert_array_equal(cut.order(np.float32([0, 40, 40, 80])), [0, 1, 2, 3])
    np.testing.assert_array_equal(between.order(np.float32([0, 7.5])), [0, 7.5])


def test_inputs_that_do_not_fit_are_refused():
    model = parameters.abstract_model(TINY["qwen2_5_omni"])
    inputs = inputs_of((ROWS[0],), "qwen2_5_omni")
    tokens = inputs["input_ids"]
    (clip,) = np.nonzero(tokens[0] == VIDEO)
    swapped = tokens.copy()
    swapped[0, [clip[7], clip[7] + 1]] = swapped[0, [clip[7] + 1, clip[7]]]
    for change, message in (
        ({"feature_attention_mask": inputs["feature_attention_mask"][:1]}, "they must be"),
        ({"feature_attention_mask": np.zeros_like(inputs["feature_attention_mask"])}, "0 frames, too few"),
        ({"input_features": inputs["input_features"][:, :9]}, "they must be"),
        ({"video_second_per_grid": None}, "need video_second_per_grid"),
        ({"video_second_per_grid": np.ones(2)}, "2 numbers for 1 clips"),
        ({"video_second_per_grid": np.ones(1)}, "placeholder tokens from number"),
        ({"input_ids": swapped}, "placeholder tokens from number"),
        ({"input_ids": np.where(tokens == AUDIO, 5, tokens)}, "placeholder tokens from number"),
        ({"input_ids": np.where(tokens == IMAGE, AUDIO, tokens)}, "placeholder tokens from number"),
        ({"input_ids": np.where(tokens == IMAGE, 5, tokens)}, "stand for 0"),
    ):
        with pytest.raises(UserError, match=message):
            hf.to_batch(model, inputs | change)
    two = {name: inputs[name][[0, 1, 1]] for name in ("input_features", "feature_attention_mask")}
    with pytest.raises(UserError, match="1 sounds more"):
        hf.to_batch(model, inputs | two)
    with pytest.raises(UserError, match="audio tower gives tokens of width 40, the text model has 96"):
        dataclasses.replace(
            TINY["qwen2_5_omni"], audio_config=dataclasses.replace(TINY["qwen2_5_omni"].audio_config, output_dim=40)
        )
    with pytest.raises(UserError, match="has no thinker_config"):
        Qwen2_5OmniConfig.from_hf({"model_type": "qwen2_5_omni"})
