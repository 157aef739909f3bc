"""Hugging Face folders in: both config spellings, slices onto any mesh, and every tensor accounted for."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from models import families
from models.qwen3 import Qwen3, Qwen3Config
from omnijax import hf, parameters
from omnijax.errors import UserError
from sharding_rules import qwen3 as rules
from tests import laws
from tests.meshes import MESHES, on

pytestmark = pytest.mark.newest

CASE = laws.GOLDEN / "qwen3" / "untied"
TIED = laws.GOLDEN / "qwen3" / "tied"
# Sizes the meshes divide, which those of the reference do not.
DIVISIBLE = {
    "model_type": "qwen3",
    "vocab_size": 72,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 10,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "attention_bias": True,
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(CASE, tmp_path / "model")
    return tmp_path / "model"


def numbered_folder(path: Path, config: dict) -> dict[str, np.ndarray]:
    """Write a checkpoint in which every element is another number, in two files with an index."""
    config_object = Qwen3Config.from_hf(config)
    described = parameters.describe(parameters.abstract_model(config_object))
    random = np.random.default_rng(0)
    ours = {key: random.permutation(np.prod(each.shape)).reshape(each.shape) for key, each in described.items()}
    model = parameters.abstract_model(config_object)
    tensors = {name: x.astype(np.float32) for name, x in hf.tensors(model, ours)}
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    for file, part in parts.items():
        save_file({name: np.ascontiguousarray(tensors[name]) for name in part}, path / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return ours


@pytest.mark.parametrize("mesh_name", MESHES)
def test_slices_land_where_the_table_says(mesh_name: str, tmp_path: Path) -> None:
    expected = numbered_folder(tmp_path / "model", DIVISIBLE)
    with on(mesh_name, rules.table()) as mesh:
        model = hf.load(Qwen3, tmp_path / "model", mesh=mesh, rules=rules.table())
        shardings = parameters.shardings(model, mesh, rules.table())
        for path, x in parameters.split(model)[1].items():
            np.testing.assert_array_equal(np.asarray(x), expected[path], err_msg=path)
            assert x.sharding.is_equivalent_to(shardings[path], x.ndim), path


def test_linear_maps_are_transposed_and_heads_split(tmp_path: Path) -> None:
    numbered_folder(tmp_path / "model", DIVISIBLE)
    params = parameters.split(hf.load(Qwen3, tmp_path / "model"))[1]
    files = [load_file(file) for file in sorted((tmp_path / "model").glob("*.safetensors"))]
    tensors = files[0] | files[1]
    q_proj = tensors["model.layers.1.self_attn.q_proj.weight"]
    assert q_proj.shape == (80, 48)
    ours = np.asarray(params["stacks.0.blocks.0.self_attn.q_proj.kernel"][1])
    assert ours[7, 3, 4] == q_proj[3 * 10 + 4, 7]
    bias = tensors["model.layers.2.self_attn.k_proj.bias"]
    assert params["stacks.0.blocks.0.self_attn.k_proj.bias"][2, 3, 9] == bias[39]
    o_proj = tensors["model.layers.0.self_attn.o_proj.weight"]
    assert params["stacks.0.blocks.0.self_attn.o_proj.kernel"][0, 5, 6, 47] == o_proj[47, 56]


@pytest.mark.parametrize("case", [CASE, TIED])
def test_both_spellings_of_a_config_are_one(case: Path, caplog: pytest.LogCaptureFixture) -> None:
    read = [json.loads((case / name).read_text()) for name in ("config.json", "config_hub_style.json")]
    with caplog.at_level(logging.WARNING):
        ours = [Qwen3Config.from_hf(values) for values in read]
    assert ours[0] == ours[1]
    assert ours[0].rope_theta == 1e6
    assert not caplog.records


def test_a_key_the_family_does_without_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    Qwen3Config.from_hf({"vocab_size": 8, "mystery": 1, "other_mystery": None})
    assert "mystery" in caplog.text
    assert "other_mystery" not in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported for this family, only 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear' is not supported"),
        ({"num_key_value_heads": 3}, "8 attention heads are not a multiple of 3 key/value heads"),
        ({"head_dim": 7}, "head_dim = 7 is odd"),
        ({"use_sliding_window": True}, "needs a positive sliding_window, not None"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 3 layers"),
    ],
)
def test_what_qwen3_has_not_is_refused(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Qwen3Config.from_hf(DIVISIBLE | change)


def test_windows_follow_layer_types_or_the_number_of_full_layers() -> None:
    values = DIVISIBLE | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    assert Qwen3Config.from_hf(values).windows() == (None, 5, 5)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert Qwen3Config.from_hf(values | {"layer_types": kinds}).windows() == (5, None, 5)
    assert Qwen3Config.from_hf(values | {"use_sliding_window": False}).windows() == (None, None, None)


def test_bf16_weights_and_bf16_models(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: x.astype(jnp.bfloat16) for name, x in tensors.items()}, folder / "model.safetensors")
    wide = parameters.split(hf.load(Qwen3, folder))[1]
    narrow = parameters.split(hf.load(Qwen3, folder, dtype=jnp.bfloat16))[1]
    for path, x in wide.items():
        assert (x.dtype, narrow[path].dtype) == (jnp.float32, jnp.bfloat16)
        np.testing.assert_array_equal(x, narrow[path].astype(jnp.float32))


def rewrite(folder: Path, **changed: np.ndarray | None) -> None:
    """Replace, add or (None) drop tensors; `__` in a name stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for name, x in changed.items():
        key = name.replace("__", ".")
        if x is None:
            del tensors[key]
        else:
            tensors[key] = x
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model__norm__weight": None}, "1 tensors are missing: model.norm.weight"),
        ({"lm_head__weight": None}, "1 tensors are missing: lm_head.weight"),
        ({"model__extra__weight": np.ones(3)}, "1 tensors are not read by this family: model.extra.weight"),
        ({"model__norm__weight": np.ones(3)}, r"model.norm.weight has shape \[3\], config.json makes it \[44\]"),
    ],
)
def test_every_tensor_is_accounted_for(folder: Path, changed: dict, message: str) -> None:
    rewrite(folder, **changed)
    with pytest.raises(UserError, match=message):
        hf.load(Qwen3, folder)


def test_buffers_of_older_checkpoints_are_no_surprise(folder: Path) -> None:
    rewrite(folder, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(6, np.float32))
    hf.load(Qwen3, folder)


def test_a_tied_head_may_be_written_twice_but_not_differ(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TIED, folder)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder, lm_head__weight=embedding)
    model = hf.load(Qwen3, folder)
    assert "lm_head.embedding" not in parameters.split(model)[1]
    rewrite(folder, lm_head__weight=embedding + 1)
    with pytest.raises(UserError, match=r"tie_word_embeddings is true but lm_head.weight differs"):
        hf.load(Qwen3, folder)


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config.json here"):
        hf.load(Qwen3, tmp_path)
    with pytest.raises(UserError, match=r"no config.json here"):
        models.family_of(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"neither model.safetensors nor"):
        hf.load(Qwen3, folder)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"lists model-00001-of-00001.safetensors, which the folder lacks"):
        hf.load(Qwen3, folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config.json is not JSON \(Expecting property name"),
        ("[" * 100_000, r"config.json is not JSON \(maximum recursion depth"),
        ("[1]", "config.json is a JSON list; it must be an object"),
        ('{"model_type": ["qwen3"]}', r"model_type \['qwen3'\] is not supported"),
        ('{"model_type": "qwen3", "hidden_size": "44"}', "config.json: hidden_size = '44' is not an int"),
        ('{"model_type": "qwen3", "rms_norm_eps": null}', "config.json: rms_norm_eps = None is not a float"),
        (
            '{"model_type": "qwen3", "layer_types": "full"}',
            r"layer_types = 'full' is not a tuple\[str, \.\.\.\] or None",
        ),
        ('{"model_type": "qwen3", "rope_scaling": "yarn"}', "rope_scaling = 'yarn' is not an object or null"),
        ('{"model_type": "qwen3", "rope_scaling": {"type": [1]}}', "rope type '.1.' is not supported"),
        (
            '{"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": "8", "low_freq_factor": 1, '
            '"high_freq_factor": 4, "original_max_position_embeddings": 64}}',
            "config.json: rope type 'llama3': factor = '8' is not a float",
        ),
    ],
)
def test_a_config_that_is_none_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        families.hugging_face(str(folder))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4567\n"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-5], "model.safetensors is damaged, or no safetensors file .*; fetch it again"),
        (lambda content: content[:20], "model.safetensors is damaged, or no safetensors file"),
        (lambda content: b"", "model.safetensors is damaged, or no safetensors file"),
        (lambda content: POINTER, "model.safetensors is only a pointer of git-lfs; fetch the weights: git lfs pull"),
    ],
    ids=["cut off", "header", "empty", "pointer"],
)
def test_a_file_that_is_no_weights_is_refused(folder: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=message):
        hf.load(Qwen3, folder)
    # Where an index lists it, it is opened only when it is read.
    index = {"weight_map": dict.fromkeys(load_file(CASE / "model.safetensors"), "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=message):
        hf.load(Qwen3, folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "index.json is not JSON"),
        ("{}", "index.json: it has no weight_map of tensor names to files"),
        ('{"weight_map": {"model.norm.weight": 1}}', "index.json: it has no weight_map of tensor names to files"),
    ],
)
def test_an_index_that_is_none_is_refused(folder: Path, index: str, message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=message):
        hf.load(Qwen3, folder)


def test_an_index_that_names_another_file_is_refused(folder: Path) -> None:
    save_file({"other": np.ones(3)}, folder / "other.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(CASE / "model.safetensors"), "other.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"other.safetensors is damaged.*File does not contain tensor"):
        hf.load(Qwen3, folder)


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_eight_bit_weights_are_refused(folder: Path, kind: str) -> None:
    """The file is the original, but that one tensor is declared in the header to be of so many bytes."""
    rewrite(folder, model__norm__weight=np.ones(44, np.int8))
    file = folder / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["model.norm.weight"]["dtype"] = kind
    written = json.dumps(header).encode()
    file.write_bytes(len(written).to_bytes(8, "little") + written + content[8 + size :])
    with pytest.raises(UserError, match=f"model.norm.weight is {kind}, not floating point of 16 bits or more"):
        hf.load(Qwen3, folder)


def test_a_folder_to_be_like_must_be_there(folder: Path, tmp_path: Path) -> None:
    model = hf.load(Qwen3, folder)
    with pytest.raises(UserError, match=r"nowhere: no config.json here"):
        hf.save(model, tmp_path / "out", like=tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()


def test_an_unknown_family_is_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "gpt5"}')
    with pytest.raises(UserError, match=r"model_type 'gpt5' is not supported; one of .*qwen3"):
        models.family_of(folder)


def test_documents_are_never_guessed() -> None:
    model = parameters.abstract_model(Qwen3Config.from_hf(DIVISIBLE))
    tokens = np.arange(6)[None]
    restarted = np.array([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(UserError, match="position_ids restart inside a row; give segment_ids or cu_seqlens"):
        hf.to_batch(model, {"input_ids": tokens, "position_ids": restarted})
    with pytest.raises(UserError, match="does not read pixel_values"):
        hf.to_batch(model, {"input_ids": tokens, "pixel_values": restarted})
    with pytest.raises(UserError, match="cu_seqlens speak of one row, input_ids has 2"):
        hf.to_batch(model, {"input_ids": np.tile(tokens, (2, 1)), "cu_seqlens": np.array([0, 6])})
    batch = hf.to_batch(model, {"input_ids": tokens, "position_ids": restarted, "cu_seqlens": np.array([0, 3, 5])})
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2, 2, 0]]


def test_labels_shift_within_documents_only() -> None:
    model = parameters.abstract_model(Qwen3Config.from_hf(DIVISIBLE))
    inputs = {
        "input_ids": np.array([[5, 6, 7, 8, 9, 0]]),
        "labels": np.array([[5, -100, 7, 8, 9, 0]]),
        "segment_ids": np.array([[1, 1, 1, 2, 2, 0]]),
    }
    batch = hf.to_batch(model, inputs)
    assert batch.targets.tolist() == [[0, 7, 0, 9, 0, 0]]
    assert batch.weights.tolist() == [[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]]


def test_only_the_held_slices_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On eight devices no read of a large tensor is larger than an eighth."""
    numbered_folder(tmp_path / "model", DIVISIBLE)
    sizes = []
    read = hf._read_piece

    def spy(files, piece, *rest):
        block = read(files, piece, *rest)
        sizes.append((piece.name, block.size))
        return block

    monkeypatch.setattr(hf, "_read_piece", spy)
    with on("data 8", rules.table()) as mesh:
        jax.block_until_ready(parameters.split(hf.load(Qwen3, tmp_path / "model", mesh=mesh, rules=rules.table()))[1])
    assert {size for name, size in sizes if name.endswith("up_proj.weight")} == {56 * 48 // 8}


@pytest.mark.parametrize("mesh_name", [None, "data 2 x sequence 2 x tensor 2", "tensor 4 x data 2"])
def test_what_lies_on_a_mesh_is_saved_as_it_came(mesh_name: str | None, tmp_path: Path) -> None:
    numbered_folder(tmp_path / "model", DIVISIBLE)
    with on(mesh_name, rules.table()) as mesh:
        hf.save(hf.load(Qwen3, tmp_path / "model", mesh=mesh, rules=rules.table()), tmp_path / "out")
    original = [load_file(file) for file in sorted((tmp_path / "model").glob("*.safetensors"))]
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(original[0] | original[1])
    for name, x in (original[0] | original[1]).items():
        np.testing.assert_array_equal(written[name], x, err_msg=name)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "input_ids must be a .rows, tokens. array"),
        ({"input_ids": [1, 2]}, "input_ids must be a .rows, tokens. array"),
        ({"input_ids": [[1, 2], [3]]}, "input_ids is ragged"),
        ({"input_ids": [[1.0, 2.9]]}, "input_ids is float64; it must hold whole numbers"),
        ({"input_ids": [[1, 72]]}, "input_ids from 1 to 72; the vocabulary is 0 to 71"),
        ({"input_ids": [[2**32 + 5, 1]]}, "input_ids from 1 to 4294967301"),
        ({"input_ids": [[1, 2]], "labels": [[-1, 2]]}, "labels from -1 to 2"),
        ({"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2]]}, "labels has shape .1, 2., input_ids .2, 2."),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}, "attention_mask has a hole"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 2, 2]]}, "attention_mask must hold 0 and 1"),
        (
            {"input_ids": [[1, 2]], "attention_mask": [[1, 0]], "segment_ids": [[1, 1]]},
            "disagree on which tokens are real",
        ),
        ({"input_ids": [[1, 2, 3]], "cu_seqlens": [0, 1, 3], "segment_ids": [[1, 1, 2]]}, "disagree on which tokens"),
        ({"input_ids": [[1, 2, 3]], "cu_seqlens": [0, 2, 1]}, "must rise from 0 to at most 3"),
        ({"input_ids": [[1, 2, 3]], "cu_seqlens": [0, 9]}, "must rise from 0 to at most 3"),
    ],
)
def test_contradictions_are_refused(inputs: dict, message: str) -> None:
    model = parameters.abstract_model(Qwen3Config.from_hf(DIVISIBLE))
    with pytest.raises(UserError, match=message):
        hf.to_batch(model, inputs)


def test_left_padding_may_number_its_padding_as_it_likes() -> None:
    model = parameters.abstract_model(Qwen3Config.from_hf(DIVISIBLE))
    inputs = {"input_ids": [[0, 0, 5, 6]], "attention_mask": [[0, 0, 1, 1]], "position_ids": [[1, 1, 0, 1]]}
    assert hf.to_batch(model, inputs).segment_ids.tolist() == [[0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": -1, "use_sliding_window": True}, "needs a positive sliding_window, not -1"),
        ({"hidden_size": 0}, "hidden_size = 0 must be positive"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps = -1.0 must be positive"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = .* changes the model"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 changes the model"),
    ],
)
def test_what_would_be_another_model_is_refused(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Qwen3Config.from_hf(DIVISIBLE | change)


@pytest.mark.parametrize(("dtype", "kind"), [("int8", "I8"), ("bool", "BOOL")])
def test_weights_that_are_no_numbers_of_the_model_are_refused(folder: Path, dtype: str, kind: str) -> None:
    norm = load_file(folder / "model.safetensors")["model.norm.weight"]
    rewrite(folder, model__norm__weight=norm.astype(dtype))
    with pytest.raises(UserError, match=f"model.norm.weight is {kind}, not floating point"):
        hf.load(Qwen3, folder)


def test_a_cast_never_makes_infinities(folder: Path, tmp_path: Path) -> None:
    norm = load_file(folder / "model.safetensors")["model.norm.weight"]
    rewrite(folder, model__norm__weight=norm * np.float32(1e6))
    with pytest.raises(UserError, match=r"model.norm.weight: a weight is beyond the largest float16"):
        hf.load(Qwen3, folder, dtype=jnp.float16)
    with pytest.raises(UserError, match="beyond the largest float16"):
        hf.save(hf.load(Qwen3, folder), tmp_path / "out", dtype=jnp.float16)
    with pytest.raises(UserError, match="cannot be cast to int8"):
        hf.save(hf.load(Qwen3, folder), tmp_path / "other", dtype=jnp.int8)
