"""A Llama in llama.cpp's GGUF file as a Hugging Face folder: weights, tokenizer and chat template."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from omnijax.errors import UserError

# Their name -> ours; `#` is the number of a layer.
NAMES = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
    "blk.#.attn_norm": "model.layers.#.input_layernorm",
    "blk.#.attn_q": "model.layers.#.self_attn.q_proj",
    "blk.#.attn_k": "model.layers.#.self_attn.k_proj",
    "blk.#.attn_v": "model.layers.#.self_attn.v_proj",
    "blk.#.attn_output": "model.layers.#.self_attn.o_proj",
    "blk.#.ffn_norm": "model.layers.#.post_attention_layernorm",
    "blk.#.ffn_gate": "model.layers.#.mlp.gate_proj",
    "blk.#.ffn_up": "model.layers.#.mlp.up_proj",
    "blk.#.ffn_down": "model.layers.#.mlp.down_proj",
}

CONTROL = 3  # the kind of a token that no text spells (gguf.TokenType.CONTROL)


def convert(file: Path, folder: Path) -> None:
    """Write `config.json`, `model.safetensors` in float32 (every number as the file has it), and the tokenizer.

    Raises `UserError` where the library `gguf` is missing, and for a GGUF file of something else.
    """
    try:
        import gguf
    except ImportError:
        raise UserError("the library gguf is missing; pip install 'omnijax[speech]', or gguf alone") from None
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = fields.get("general.architecture"), fields.get("tokenizer.ggml.pre")
    if kind != ("llama", "smollm"):
        raise UserError(f"{file} has the architecture and tokenizer {kind}; this reads ('llama', 'smollm') only")
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    tensors = {}
    for tensor in reader.tensors:
        layer = next((part for part in tensor.name.split(".") if part.isdecimal()), "")
        their_name = ".".join("#" if part == layer else part for part in tensor.name.split(".")[:-1])
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if their_name.endswith(("attn_q", "attn_k")):
            values = _rotate_half(values, heads if their_name.endswith("q") else kv_heads)
        tensors[NAMES[their_name].replace("#", layer) + ".weight"] = values
    tied = "lm_head.weight" not in tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", _config(fields, heads, kv_heads, tied))
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_config(fields))
    ends = {name: fields[f"tokenizer.ggml.{key}_token_id"] for name, key in _SPECIAL.items() if name != "unk"}
    _write(folder / "generation_config.json", {f"{name}_token_id": number for name, number in ends.items()})


def _rotate_half(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp keeps the two halves of each head's rows interleaved; rotary positions here take them side by side."""
    return np.ascontiguousarray(values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape))


def _config(fields: dict[str, Any], heads: int, kv_heads: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.3g}"),  # a float32 in the file
        "rope_theta": fields["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte pairs as in GPT-2, each digit a token of its own: what llama.cpp calls the pre-tokenizer "smollm"."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    special = {f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in _SPECIAL.items()}
    return {
        **special,
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",  # of tokenizer.json as it is
    }


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n")
