"""A Whisper in CTranslate2's container as a Hugging Face folder: weights, tokenizer, settings of generation."""

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors.numpy import save_file

from omnijax.errors import UserError

BINARY_VERSION = 6
DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}

# What CTranslate2 calls a module -> what Hugging Face does; several where it lays weights on top of one another.
OUTER = {
    "conv1": "conv1",
    "conv2": "conv2",
    "embeddings": "embed_tokens",
    "layer_norm": "layer_norm",
    "position_encodings": "embed_positions",
}
INNER = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
LEAVES = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias", "encodings": "weight"}


def read(file: BinaryIO) -> dict[str, np.ndarray]:
    """The variables of a `model.bin` of CTranslate2, as laid out in its `src/models/model.cc`.

    Raises `UserError` where it is none, of another version, or cut off.
    """

    def take(layout: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", file.read(struct.calcsize(f"<{layout}")))

    def text() -> str:
        return file.read(*take("H")).rstrip(b"\0").decode()

    try:
        (version,) = take("I")
        kind = text() if version == BINARY_VERSION else ""
        if kind != "WhisperSpec":
            raise UserError(f"model.bin has version {version} and holds {kind!r}; this reads 6 and 'WhisperSpec' only")
        _revision, count = take("II")
        variables = {}
        for _ in range(count):
            name, (rank,) = text(), take("B")
            shape, (dtype, size) = take(f"{rank}I"), take("BI")
            variables[name] = np.frombuffer(file.read(size), DTYPES[dtype]).reshape(shape)
    except (struct.error, ValueError, KeyError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"model.bin is damaged, or no model of CTranslate2 ({error}); fetch it again") from error
    return variables


def tensors(variables: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights of `WhisperForConditionalGeneration`; the head is the embedding, and keys have no bias."""
    found = {}
    for name, value in variables.items():
        part, *modules, leaf = name.split("/")
        if leaf not in LEAVES:  # settings, not weights
            continue
        layer = modules.pop(0).removeprefix("layer_") if modules[0].startswith("layer_") and len(modules) > 1 else None
        if layer is None:
            found[f"model.{part}.{OUTER[modules[0]]}.{LEAVES[leaf]}"] = value
            continue
        targets = INNER["/".join(modules)]
        for target, piece in zip(targets, np.split(value, len(targets)), strict=True):
            path = f"model.{part}.layers.{layer}.{target}.{LEAVES[leaf]}"
            if not path.endswith("k_proj.bias"):
                found[path] = np.ascontiguousarray(piece)
            elif piece.any():
                raise UserError(f"{name}: keys have a bias that is not 0, which Whisper's have not")
    return found


def convert(model: BinaryIO, settings: dict[str, Any], tokenizer: bytes, folder: Path) -> None:
    """Write a folder of `model.bin`, its `config.json` and its `tokenizer.json`; float16, as they are there."""
    variables = read(model)
    weights = tensors(variables)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_bytes(tokenizer)
    ids = {token["content"]: token["id"] for token in json.loads(tokenizer)["added_tokens"]}
    end, start, no_timestamps = (ids[f"<|{name}|>"] for name in ("endoftext", "startoftranscript", "notimestamps"))
    special = {
        "bos_token_id": end,
        "decoder_start_token_id": start,
        "eos_token_id": end,
        "pad_token_id": end,
    }
    _write(folder / "config.json", _config(variables, weights) | special)
    generation = {
        "alignment_heads": settings["alignment_heads"],
        "begin_suppress_tokens": settings["suppress_ids_begin"],
        "is_multilingual": len(weights["model.decoder.embed_tokens.weight"]) > 51864,
        "max_length": len(weights["model.decoder.embed_positions.weight"]),
        "no_timestamps_token_id": no_timestamps,
        "suppress_tokens": settings["suppress_ids"],
    }
    _write(folder / "generation_config.json", generation | special)
    names = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|endoftext|>")
    _write(folder / "tokenizer_config.json", {**names, "tokenizer_class": "PreTrainedTokenizerFast"})
    bins = weights["model.encoder.conv1.weight"].shape[1]
    processor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": bins, "sampling_rate": 16000}
    _write(folder / "preprocessor_config.json", processor)


def _config(variables: dict[str, np.ndarray], weights: dict[str, np.ndarray]) -> dict[str, Any]:
    """What shapes say, and the two numbers of heads."""
    config: dict[str, Any] = {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}
    vocab_size, width = weights["model.decoder.embed_tokens.weight"].shape
    for part in ("encoder", "decoder"):
        config[f"{part}_layers"] = sum(f"model.{part}.layers." in name and "fc1.bias" in name for name in weights)
        config[f"{part}_attention_heads"] = int(variables[f"{part}/num_heads"])
        config[f"{part}_ffn_dim"] = len(weights[f"model.{part}.layers.0.fc1.bias"])
    positions = {part: len(weights[f"model.{part}.embed_positions.weight"]) for part in ("encoder", "decoder")}
    return config | {
        "activation_function": "gelu",
        "d_model": width,
        "max_source_positions": positions["encoder"],
        "max_target_positions": positions["decoder"],
        "num_hidden_layers": config["encoder_layers"],
        "num_mel_bins": weights["model.encoder.conv1.weight"].shape[1],
        "scale_embedding": bool(variables["decoder/scale_embeddings"]),
        "torch_dtype": "float16",
        "vocab_size": vocab_size,
    }


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n")
