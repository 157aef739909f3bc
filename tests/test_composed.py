"""Models of parts: weights of separate folders, new projectors and tokens, tables by part, the laws."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from models import families
from models.composed import Encoder, OmniConfig
from models.llama import LlamaConfig
from models.projectors import Projector
from models.qwen3_moe import Qwen3MoeConfig
from models.vision.qwen2_vl import Qwen2VLVisionConfig
from omnijax import hf, parameters
from omnijax.batch import Batch
from omnijax.convert import export_weights
from omnijax.errors import UserError
from omnijax.sharding import Rules, with_parts
from omnijax.start import starting_model
from sharding_rules import audio_tower, llama, qwen3_moe, vision_tower
from tests import laws
from tests.laws import GOLDEN
from tests.meshes import arrays_of, on
from tests.test_thinkers import LENGTH, ROWS, TINY, inputs_of, padded

OMNI = GOLDEN / "qwen2_5_omni" / "text_image_audio_video"
LLAMA = GOLDEN / "llama" / "tied_llama3rope"
TEXT = {
    "vocab_size": 208,
    "hidden_size": 80,
    "intermediate_size": 120,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "initializer_range": 0.05,
}
EARS = dataclasses.replace(TINY["qwen2_5_omni"].audio_config, output_dim=40)
ENCODERS = {
    "audio": Encoder(EARS, Projector("pixel_shuffle", merged=2)),
    "image": Encoder(TINY["qwen2_5_omni"].vision_config, Projector("mlp")),
}
TINY_OMNI = {
    "llama": OmniConfig(LlamaConfig(**TEXT), ENCODERS),
    "qwen3_moe": OmniConfig(
        Qwen3MoeConfig(**TEXT, head_dim=12, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2), ENCODERS
    ),
}
PARTS = {"encoders.audio": audio_tower.table(), "encoders.image": vision_tower.table("ring")}
TABLES = {
    "llama": with_parts(llama.table(), PARTS),
    "qwen3_moe": with_parts(qwen3_moe.table(), {"encoders.image": vision_tower.table()}),
}


@functools.cache
def mixed_arrays() -> dict[str, np.ndarray]:
    """Rows of the omni family, for a model that counts positions along one axis and joins two sounds to a token."""
    inputs = inputs_of(ROWS * 2, "qwen2_5_omni")
    arrays = arrays_of(padded(hf.to_batch(parameters.abstract_model(TINY["qwen2_5_omni"]), inputs)))
    places = np.arange(LENGTH) - np.maximum.accumulate(
        np.where(np.diff(arrays["segment_ids"], axis=1, prepend=0) != 0, np.arange(LENGTH), 0), axis=1
    )
    sounds = arrays["slots.audio"]
    return arrays | {"positions": places.astype(np.int32), "slots.audio": np.where(sounds < 0, -1, sounds // 2)}


@functools.cache
def one_device(name: str) -> dict:
    return laws.run(TINY_OMNI[name], TABLES[name], None, arrays=mixed_arrays())


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", "data 2 x sequence 2 x tensor 2"),
        pytest.param("llama", "data 8", marks=pytest.mark.full),
        pytest.param("qwen3_moe", "expert 2 x sequence 2 x data 2", marks=pytest.mark.full),
    ],
)
def test_equivalence(name, mesh):
    laws.equivalence(TINY_OMNI[name], TABLES[name], mesh, one_device(name), arrays=mixed_arrays())


def test_a_part_lies_where_its_own_table_says():
    lines = {line.name: line for line in vision_tower.table().parameters}
    other = dataclasses.replace(
        vision_tower.table(), parameters=tuple(dataclasses.replace(line, alternatives=((),)) for line in lines.values())
    )
    with on("data 2 x sequence 2 x tensor 2", llama.table()) as mesh:
        model = parameters.abstract_model(TINY_OMNI["llama"])
        found = parameters.placements(model, mesh, with_parts(llama.table(), {"encoders.image": other}))
        with pytest.raises(UserError, match=r"no parameter of encoders\.imag has an axis 'layers'"):
            parameters.placements(model, mesh, with_parts(llama.table(), {"encoders.imag": other}))
    for path, placement in found.items():
        split = any(placement.spec)
        if path.startswith("encoders.image."):
            assert not split, path
        elif path.endswith("kernel") and path.startswith("backbone."):
            assert split, path
    rows = dataclasses.replace(other, activations=tuple(line for line in other.activations if line.name != "batch"))
    with pytest.raises(UserError, match="no line for axis 'batch'"):
        with_parts(llama.table(), {"encoders.image": rows})


def from_folders(vocab_size: int | None = None) -> OmniConfig:
    """The paper's LLaMA#Omni in small: Llama, and the towers of Qwen2.5-Omni."""
    return OmniConfig(
        backbone=families.hugging_face(str(LLAMA), vocab_size),
        start=str(LLAMA),
        encoders={
            "image": Encoder(families.tower(str(OMNI), "vision"), Projector("linear"), str(OMNI)),
            "audio": Encoder(families.tower(str(OMNI), "audio"), Projector("patch_merge", merged=2), str(OMNI)),
        },
    )


@pytest.mark.parametrize("mesh", [None, "data 8"])
def test_weights_come_from_a_folder_for_each_part(mesh):
    stored = families.hugging_face(str(LLAMA)).vocab_size
    config, rules = from_folders(stored + 6), llama.table()
    with on(mesh, rules) as on_mesh:
        model = starting_model(config, on_mesh, rules, start=None, seed=0, vocab_multiple=4)
        fresh = parameters.build_model(config, on_mesh, rules, seed=0, vocab_multiple=4)
        params, new = (jax.device_get(parameters.split(each)[1]) for each in (model, fresh))
    backbone = dict(
        hf.tensors(model.backbone, {p.removeprefix("backbone."): x for p, x in params.items() if "back" in p})
    )
    for name, x in load_file(LLAMA / "model.safetensors").items():
        np.testing.assert_array_equal(backbone[name][: len(x)], x, err_msg=name)
    table = params["backbone.embed_tokens.embedding"]
    mean = load_file(LLAMA / "model.safetensors")["model.embed_tokens.weight"].astype(np.float64).mean(0)
    np.testing.assert_allclose(table[stored : stored + 6], np.tile(mean, (6, 1)), rtol=1e-6)
    assert not table[stored + 6 :].any()
    theirs = load_file(OMNI / "model.safetensors")
    for name, prefix in (("image", "visual."), ("audio", "audio_tower.")):
        tower = model.encoders[name].tower
        of = f"encoders.{name}.tower."
        found = dict(hf.tensors(tower, {p.removeprefix(of): x for p, x in params.items() if p.startswith(of)}))
        assert found.keys() == {name for name in theirs if name.startswith(prefix)}
        for each, x in found.items():
            np.testing.assert_array_equal(x, theirs[each], err_msg=each)
    for path in params:
        if ".projector." in path:
            np.testing.assert_array_equal(params[path], new[path])


def test_what_is_exported_is_each_part(tmp_path):
    config, rules = from_folders(), llama.table()
    with on(None, rules) as mesh:
        model = starting_model(config, mesh, rules, start=None, seed=0)
    export_weights(model, str(tmp_path / "out"), None, "float32")
    for name, x in load_file(LLAMA / "model.safetensors").items():
        np.testing.assert_array_equal(load_file(tmp_path / "out/backbone/model.safetensors")[name], x, err_msg=name)
    again = OmniConfig(
        backbone=families.hugging_face(str(tmp_path / "out/backbone")),
        start=str(tmp_path / "out/backbone"),
        encoders={
            "image": Encoder(
                families.tower(str(tmp_path / "out/encoders.image"), "vision"),
                Projector("linear"),
                str(tmp_path / "out/encoders.image"),
            ),
            "audio": Encoder(
                families.tower(str(tmp_path / "out/encoders.audio"), "audio"),
                Projector("patch_merge", merged=2),
                str(tmp_path / "out/encoders.audio"),
            ),
        },
    )
    with on(None, rules) as mesh:
        loaded = starting_model(again, mesh, rules, start=None, seed=0)
    params, expected = parameters.split(loaded)[1], parameters.split(model)[1]
    for path, x in expected.items():
        np.testing.assert_array_equal(params[path], x, err_msg=path)
    projectors = load_file(tmp_path / "out/projectors.safetensors")
    assert projectors.keys() == {path for path in expected if ".projector." in path}


def test_two_encoders_read_pictures():
    small = Qwen2VLVisionConfig(
        depth=1, num_heads=2, patch_size=4, temporal_patch_size=1, embed_dim=16, hidden_size=80, mlp_ratio=2
    )
    config = OmniConfig(LlamaConfig(**TEXT), {"image": ENCODERS["image"], "thumbnail": Encoder(small)})
    model = config.build(rngs=nnx.Rngs(0))
    arrays = mixed_arrays()
    batch = Batch(**{name: jnp.asarray(x[:1]) for name, x in arrays.items() if "." not in name})
    whole = hf.to_batch(parameters.abstract_model(TINY["qwen2_5_omni"]), inputs_of(ROWS[:1], "qwen2_5_omni"))
    grid = np.tile(np.array([1, 2, 2], np.int32), (1, 4, 1))
    place = np.array([[[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]], np.int32)
    thumbnail = type(whole.media["image"])(
        jnp.ones((1, 4, 48)), jnp.ones((1, 4), jnp.int32), jnp.asarray(place), jnp.asarray(grid), jnp.full((1, 4), 48)
    )
    slots = np.full((1, LENGTH), -1, np.int32)
    slots[0, 1] = 0
    both = dataclasses.replace(
        batch,
        media={"image": whole.media["image"], "thumbnail": thumbnail},
        slots={"image": whole.slots["image"], "thumbnail": jnp.asarray(slots)},
    )

    def reach(features):
        media = {**both.media, "thumbnail": dataclasses.replace(thumbnail, features=features)}
        return model(dataclasses.replace(both, media=media)).hidden[0, 1].sum()

    assert jax.jit(jax.grad(reach))(thumbnail.features).any()


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(UserError, match="tokens of 'audio' have width 40, the language model 80"):
        OmniConfig(LlamaConfig(**TEXT), {"audio": Encoder(EARS)})
    with pytest.raises(UserError, match="encoders is empty"):
        OmniConfig(LlamaConfig(**TEXT), {})
    with pytest.raises(UserError, match="must be a plain word"):
        OmniConfig(LlamaConfig(**TEXT), {"a.b": ENCODERS["image"]})
    with pytest.raises(UserError, match="is not the config of a tower"):
        OmniConfig(LlamaConfig(**TEXT), {"audio": Encoder(3, Projector())})
    with pytest.raises(UserError, match=r"Projector\.merged = 2 with kind 'mlp' must be 1"):
        Projector("mlp", merged=2)
    with pytest.raises(UserError, match="its audio tower 'llama' is not supported"):
        families.tower(str(LLAMA), "audio")
    with pytest.raises(UserError, match=r"hugging_face\.vocab_size = 5 is less"):
        families.hugging_face(str(LLAMA), 5)
    config, rules = from_folders(), Rules((), ())
    with pytest.raises(UserError, match="the model is composed"):
        starting_model(config, None, rules, start=str(LLAMA), seed=0)
    other = dataclasses.replace(config, backbone=dataclasses.replace(config.backbone, rope_theta=7.0))
    with on(None, llama.table()) as mesh, pytest.raises(UserError, match="another model: rope_theta"):
        starting_model(other, mesh, llama.table(), start=None, seed=0)
    shutil.copy(LLAMA / "config.json", tmp_path)
    gone = dataclasses.replace(config, start=str(tmp_path))
    with on(None, llama.table()) as mesh, pytest.raises(UserError, match=r"neither model\.safetensors"):
        starting_model(gone, mesh, llama.table(), start=None, seed=0)
