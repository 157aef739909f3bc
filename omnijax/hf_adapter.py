"""Adapters for Hugging Face: a folder that `peft.PeftModel.from_pretrained` puts onto the model transformers loads.

There a linear map has modules `lora_A` [rank, inputs] and `lora_B` [outputs, rank]. Experts that are one tensor have
them for all together: `lora_A` [experts x rank, inputs] and `lora_B` [outputs, rank x experts], by `target_parameters`.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array
from safetensors.numpy import save_file

from omnijax import parameters
from omnijax.config import Lora
from omnijax.errors import UserError
from omnijax.hf_layout import Names, Piece, pieces
from omnijax.lora import leading_axes, paths_of
from omnijax.parameters import Description

OF_EXPERTS = (".gate_proj", ".up_proj", ".down_proj")
"""In families with experts, peft takes modules of these names for experts; others of them it has by their weight."""


def save_adapter(
    model: nnx.Module,
    params: Mapping[str, Array],
    family: Any,
    lora: Lora,
    path: str | os.PathLike[str],
    *,
    base: str | None = None,
) -> None:
    """Write the adapters of a model with these parameters; `base` is the folder of the model they belong to, if known.

    Raises `UserError` where `path` holds an adapter, and for dropout where peft has none.
    """
    folder = Path(path)
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder} already holds an adapter; choose another folder")
    names, described = names_in_memory(family), parameters.describe(model)
    modules, targets, tensors = list[str](), list[str](), dict[str, np.ndarray]()
    experts: dict[str, list[tuple[str, np.ndarray, np.ndarray]]] = {}
    mixed = any(".experts." in name for name in names)
    for kernel in described:
        if not kernel.endswith("kernel") or paths_of(kernel)[0] not in params:
            continue
        a, b = (np.asarray(params[each], np.float32) for each in paths_of(kernel))
        for piece in pieces(kernel, described, names):
            pair = _tensors(described[kernel], piece, a, b)
            module, _, last = piece.name.rpartition(".")
            if last != "weight":
                experts.setdefault(module, []).append((last, *pair))
                continue
            tensors |= _named(module, *pair)
            if mixed and module.endswith(OF_EXPERTS):
                targets.append(piece.name)
            else:
                modules.append(module)
    order = [name.rpartition(".")[2] for name in names]
    for module, own in experts.items():
        # Of several tensors of a module, peft wraps one after the other, each inside of the next.
        for inside, (last, *factors) in enumerate(sorted(own, key=lambda each: order.index(each[0]), reverse=True)):
            tensors |= _named(f"{module}{'.base_layer' * inside}", *factors)
            targets.append(f"{module}.{last}")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if family.Config.HF_CLASS.endswith("ForCausalLM") else None,
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": modules,
        "target_parameters": targets or None,
    }
    if targets and lora.dropout:
        raise UserError(
            f"{targets[0]}: peft has no dropout before it, and Lora.dropout = {lora.dropout}; export merged"
        )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2))


def names_in_memory(family: Any) -> Names:
    """The layout of a family's tensors that transformers has in memory, where it is not that of the checkpoints.

    There all but the head is inside of `model`, and the experts of a layer are one tensor.
    """
    for names in (family.HF_NAMES, *getattr(family, "HF_OTHER_NAMES", ())):
        if all(name.startswith(("model.", "lm_head.")) and "{expert}" not in name for name in names):
            return names
    return family.HF_NAMES


def _named(module: str, *pair: np.ndarray) -> dict[str, np.ndarray]:
    return {f"base_model.model.{module}.lora_{letter}.weight": x for letter, x in zip("AB", pair, strict=True)}


def _tensors(kernel: Description, piece: Piece, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`lora_A` and `lora_B` of one tensor, of which A and B hold those of the whole kernel."""
    lead, inputs = leading_axes(kernel), kernel.inputs or 0
    # B has one axis, the rank, for all inputs of the kernel.
    of_b = {axis if axis < lead else axis - inputs + 1: index for axis, index in piece.fixed.items()}
    a = a[tuple(piece.fixed.get(axis, slice(None)) if axis < lead else slice(None) for axis in range(a.ndim))]
    b = b[tuple(of_b.get(axis, slice(None)) for axis in range(b.ndim))]
    left = lead - sum(axis < lead for axis in piece.fixed)  # 1 where the tensor is of all experts
    experts, rank = a.shape[:left], a.shape[-1]
    a, b = a.reshape(*experts, -1, rank), b.reshape(*experts, rank, -1)
    if not experts:
        return np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    a = a.transpose(0, 2, 1).reshape(-1, a.shape[1])
    return np.ascontiguousarray(a), np.ascontiguousarray(b.transpose(2, 1, 0).reshape(b.shape[-1], -1))
