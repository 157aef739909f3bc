"""The layers of `gpu.py` in torch: flash attention by SDPA, experts by its grouped product, AdamW fused.

float32 parameters, bfloat16 computation, each layer recomputed in the backward pass; rows are whole documents.
"""

import functools
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

HALF = torch.bfloat16
# The second name is that of versions before 2.10.
grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.02)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; Qwen2's has biases, Qwen3's normalises each head."""

    def __init__(self, sizes: Mapping[str, Any]):
        super().__init__()
        width, self.heads, self.kv_heads = (
            sizes[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
        )
        self.dim = sizes.get("head_dim", width // self.heads)
        outputs = (self.heads + 2 * self.kv_heads) * self.dim
        self.qkv, self.out = weight(outputs, width), weight(width, self.heads * self.dim)
        is_qwen3 = "num_experts" in sizes
        self.bias = None if is_qwen3 else nn.Parameter(torch.zeros(outputs))
        self.norms = nn.ParameterList([torch.ones(self.dim)] * 2 if is_qwen3 else [])

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        bias = None if self.bias is None else self.bias.to(HALF)
        heads = F.linear(x, self.qkv.to(HALF), bias).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), 1)
        if len(self.norms):
            q, k = (
                F.rms_norm(y, (self.dim,), scale.to(HALF), 1e-6) for y, scale in zip((q, k), self.norms, strict=True)
            )
        q, k = (rotate(y, rotation) for y in (q, k))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(y.transpose(1, 2).flatten(2), self.out.to(HALF))


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class GatedMLP(nn.Module):
    def __init__(self, sizes: Mapping[str, Any]):
        super().__init__()
        width, hidden = sizes["hidden_size"], sizes["intermediate_size"]
        self.gate_up, self.down = weight(2 * hidden, width), weight(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up.to(HALF)).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down.to(HALF))


class Experts(nn.Module):
    """The k most probable of softmax, their weights renormalised; choices sorted by expert."""

    def __init__(self, sizes: Mapping[str, Any]):
        super().__init__()
        width, hidden, count = sizes["hidden_size"], sizes["moe_intermediate_size"], sizes["num_experts"]
        self.chosen, self.router = sizes["num_experts_per_tok"], weight(count, width)
        self.gate_up, self.down = weight(count, 2 * hidden, width), weight(count, width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, choice = F.linear(tokens.float(), self.router).softmax(-1).topk(self.chosen)
        weights = (weights / weights.sum(-1, keepdim=True)).flatten()
        order = choice.flatten().argsort()
        ends = torch.bincount(choice.flatten(), minlength=len(self.router)).cumsum(0).to(torch.int32)
        rows = order // self.chosen
        gate, up = grouped_mm(tokens[rows], self.gate_up.to(HALF).mT, offs=ends).chunk(2, -1)
        hidden = F.silu(gate) * up * weights[order, None].to(HALF)
        y = grouped_mm(hidden, self.down.to(HALF).mT, offs=ends)
        return torch.zeros_like(tokens).index_add(0, rows, y).view_as(x)


class Layer(nn.Module):
    def __init__(self, sizes: Mapping[str, Any]):
        super().__init__()
        self.norms = nn.ParameterList([torch.ones(sizes["hidden_size"]) for _ in range(2)])
        self.attention = Attention(sizes)
        self.mlp = Experts(sizes) if "num_experts" in sizes else GatedMLP(sizes)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        norm = functools.partial(F.rms_norm, normalized_shape=x.shape[-1:], eps=1e-6)
        x = x + self.attention(norm(x, weight=self.norms[0].to(HALF)), rotation)
        return x + self.mlp(norm(x, weight=self.norms[1].to(HALF)))


class Decoder(nn.Module):
    def __init__(self, sizes: Mapping[str, Any]):
        super().__init__()
        width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        self.embedding, self.head = weight(sizes["vocab_size"], width), weight(sizes["vocab_size"], width)
        self.layers = nn.ModuleList([Layer(sizes) for _ in range(sizes["num_hidden_layers"])])
        self.norm, self.dim = nn.Parameter(torch.ones(width)), sizes.get("head_dim", width // heads)
        self.theta = sizes["rope_theta"]

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss of predicting the next token."""
        half = torch.arange(0, self.dim, 2, device=tokens.device) / self.dim
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), self.theta**-half).repeat(1, 2)
        rotation = angles.cos().to(HALF), angles.sin().to(HALF)
        x = F.embedding(tokens, self.embedding).to(HALF)
        for layer in self.layers:
            x = checkpoint(layer, x, rotation, use_reentrant=False)
        x = F.rms_norm(x, x.shape[-1:], self.norm.to(HALF), 1e-6)
        logits = F.linear(x, self.head.to(HALF)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def measure(sizes: Mapping[str, Any], *, rows: int, length: int, steps: int, device: str = "cuda") -> dict[str, Any]:
    """The device, seconds of a train step (the median), its memory, and the last loss."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(sizes)
        tokens = torch.randint(sizes["vocab_size"], (rows, length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps + 2):  # the first two warm up
        start = time.perf_counter()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        seconds.append(time.perf_counter() - start)
    held = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    name = torch.cuda.get_device_name() if device == "cuda" else device
    return {"device": name, "seconds": sorted(seconds[2:])[steps // 2], "bytes": held, "loss": value}
