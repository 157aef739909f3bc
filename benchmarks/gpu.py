"""Stacks of layers on one GPU: OmniJAX by kernel, and the same layers in torch; at most eight minutes.

    python benchmarks/gpu.py [results.json]

The layers of Qwen2-7B and Qwen3-30B-A3B, as many as leave room on one card, with a small vocabulary: whole train steps
of AdamW with float32 parameters and bfloat16 computation, all activations recomputed. Each group of cases runs in a
process of its own, so that a failure or a kernel that takes too long costs only its group. Printed, and written as
JSON: tokens/s, milliseconds and memory of a step, and MFU, which counts the query-key pairs really attended.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TOKENS, STEPS = 32768, 5
SECONDS, SECONDS_IN_ALL = 75, 470

SHARED = {"vocab_size": 1024, "num_hidden_layers": 4, "num_key_value_heads": 4, "rope_theta": 1e6}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": SHARED | {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28},
    "qwen3_moe": SHARED
    | {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "head_dim": 128,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
}
# (tokens of a row, documents in it): whole rows as torch's kernel wants them, and a packed one.
ROWS = ((8192, 1), (16384, 1), (32768, 1), (32768, 8))


@dataclasses.dataclass(frozen=True)
class Group:
    """Cases that run in one process: a model, and who computes it."""

    model: str
    library: str
    attention: str = ""
    experts: str = ""
    rows: Sequence[tuple[int, int]] = ROWS

    def name(self) -> str:
        return " ".join(part for part in (self.model, self.library, self.attention, self.experts) if part)


# The most wanted first, as time may run out. The experts' kernel `ragged` is none of them: compiled by jax 0.10.2, in
# which every row meets every expert, it asks for 348 GiB.
GROUPS = (
    Group("qwen2", "omnijax", "cudnn"),
    Group("qwen3_moe", "omnijax", "cudnn", "tokamax"),
    Group("qwen2", "torch", rows=ROWS[:3]),
    Group("qwen3_moe", "torch", rows=ROWS[:3]),
    Group("qwen3_moe", "omnijax", "cudnn", "blocks"),
    Group("qwen2", "omnijax", "tokamax"),
    Group("qwen2", "omnijax", "blockwise"),
)


def main(path: str) -> None:
    if (found := _answer("import jax; print(jax.default_backend())")) != "gpu":
        print(f"there is no GPU here (jax runs on: {found}); nothing was measured")
        return
    torch = _answer("import torch; print(torch.cuda.is_available())") == "True"
    end, results = time.monotonic() + SECONDS_IN_ALL, []
    for group in GROUPS:
        left = min(SECONDS, end - time.monotonic())
        if group.library == "torch" and not torch:
            found = _failures(group, "torch with CUDA cannot be imported")
        elif left < 20:
            found = _failures(group, "no time left")
        else:
            found = run(group, left)
        results += found
        print(table(found), flush=True)
        Path(path).write_text(json.dumps(results, indent=1))
    print(f"\n{table(results)}\nwritten: {path}")


def run(group: Group, seconds: float) -> list[dict[str, Any]]:
    """The results of a group that has so many seconds; what it did not reach is a failure that says why."""
    from omnijax.xla_flags import gpu_flags

    environment = {"XLA_FLAGS": gpu_flags(), "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"} | os.environ
    if group.library == "torch":
        environment["JAX_PLATFORMS"] = "cpu"  # which counts operations there, and would else take the card's memory
    command = [sys.executable, __file__, "group", str(GROUPS.index(group))]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            output, why = process.communicate(timeout=seconds)[0], ""
        except subprocess.TimeoutExpired:
            process.kill()
            output, why = process.communicate()[0], f"took more than {seconds:.0f} s with those before it"
    lines = output.splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return found + _failures(group, why or " ".join(lines[-1:]) or "ended", group.rows[len(found) :])


def run_here(group: Group) -> None:
    """Measure the cases of a group, a line of JSON for each."""
    for length, documents in group.rows:
        case = {"group": group.name(), "length": length, "documents": documents}
        try:
            if group.library == "torch":
                from gpu_torch import measure as measure_torch

                case |= measure_torch(MODELS[group.model], rows=TOKENS // length, length=length, steps=STEPS)
            else:
                case |= measure(
                    group.model,
                    MODELS[group.model],
                    rows=TOKENS // length,
                    length=length,
                    documents=documents,
                    attention=group.attention,
                    experts=group.experts or "auto",
                    steps=STEPS,
                )
            case |= rates(group.model, case, TOKENS // length)
        except Exception as error:  # whatever it is, the next case may do
            case["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(json.dumps(case), flush=True)


def measure(
    family: str,
    sizes: Mapping[str, Any],
    *,
    rows: int,
    length: int,
    documents: int,
    attention: str,
    experts: str,
    steps: int,
) -> dict[str, Any]:
    """The device, seconds of a train step (the median), its memory, seconds to compile, and the last loss."""
    import jax
    import optax

    from omnijax import parameters, sharding
    from omnijax.mesh import make_mesh
    from omnijax.nn.attention import use_kernel
    from omnijax.nn.experts import use_grouped
    from omnijax.step import init_state, put_batch, train_step

    config, rules = _config(family, sizes)
    mesh = make_mesh(data=1, devices=jax.devices()[:1])
    optimizer = optax.adamw(1e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    with sharding.use(mesh, rules), use_kernel(attention), use_grouped(experts):
        model = parameters.build_model(config, mesh, rules, remat="full")
        state = init_state(model, optimizer, mesh, rules)
        batch = put_batch(packed(rows, length, documents, config.vocab_size), mesh, rules)
        start = time.perf_counter()
        step = train_step(model, optimizer, mesh, rules).lower(state, batch).compile()
        compiled, memory, seconds = time.perf_counter() - start, step.memory_analysis(), []
        for _ in range(steps + 2):  # the first two warm up
            start = time.perf_counter()
            state, report = step(state, batch)
            loss = float(report["loss"])
            seconds.append(time.perf_counter() - start)
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "device": mesh.devices.flat[0].device_kind,
        "seconds": sorted(seconds[2:])[steps // 2],
        "bytes": held + memory.temp_size_in_bytes,
        "compile_seconds": compiled,
        "loss": loss,
    }


def packed(rows: int, length: int, documents: int, vocabulary: int) -> dict[str, Any]:
    """Rows of random tokens in so many documents of uneven length."""
    import numpy as np

    random = np.random.default_rng(0)
    tokens = random.integers(0, vocabulary, (rows, length), dtype=np.int32)
    cuts = np.sort(random.choice(np.arange(1, length), (rows, documents - 1), replace=False), axis=1)
    index = np.arange(length, dtype=np.int32)
    segments = 1 + (index >= cuts[..., None]).sum(1, dtype=np.int32)
    starts = np.where(index >= cuts[..., None], cuts[..., None], 0).max(1, initial=0).astype(np.int32)
    return {
        "tokens": tokens,
        "segment_ids": segments,
        "positions": index - starts,
        "targets": np.roll(tokens, -1, axis=1),
        "weights": np.ones(tokens.shape, np.float32),
        "sources": 0 * tokens,
    }


def rates(family: str, case: Mapping[str, Any], rows: int) -> dict[str, float | None]:
    """Tokens/s of a measured case, and MFU where the peak of its device is known."""
    from omnijax import flops, parameters

    config, _ = _config(family, MODELS[family])
    cost = flops.forward_cost(parameters.abstract_model(config), config.attention_costs())
    segments = packed(rows, case["length"], case["documents"], config.vocab_size)["segment_ids"]
    peak, seconds = flops.peak_flops(case["device"], None), case["seconds"]
    return {
        "tokens_per_second": segments.size / seconds,
        "mfu": flops.training_flops(cost, segments) / seconds / peak if peak else None,
    }


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The results as lines of text."""
    lines = [f"{'':34}{'row':>7}{'documents':>10}{'tokens/s':>10}{'ms/step':>9}{'MFU':>7}{'GiB':>7}"]
    for each in results:
        text = f"{each['group']:34}{each['length']:>7}{each['documents']:>10}"
        if "error" in each:
            lines.append(f"{text}  {each['error']}")
        else:
            mfu = "-" if each["mfu"] is None else f"{each['mfu']:.1%}"
            speed = f"{each['tokens_per_second']:>10.0f}{each['seconds'] * 1e3:>9.0f}{mfu:>7}"
            lines.append(f"{text}{speed}{each['bytes'] / 2**30:>7.1f}")
    return "\n".join(lines)


def _config(family: str, sizes: Mapping[str, Any]) -> tuple[Any, Any]:
    from models import qwen2, qwen3_moe
    from sharding_rules import qwen2 as qwen2_rules
    from sharding_rules import qwen3_moe as qwen3_moe_rules

    kinds = {"qwen2": (qwen2.Qwen2Config, qwen2_rules), "qwen3_moe": (qwen3_moe.Qwen3MoeConfig, qwen3_moe_rules)}
    kind, rules = kinds[family]
    return kind(**sizes), rules.table()


def _failures(group: Group, why: str, rows: Sequence[tuple[int, int]] | None = None) -> list[dict[str, Any]]:
    rows = group.rows if rows is None else rows
    return [{"group": group.name(), "length": length, "documents": each, "error": why} for length, each in rows]


def _answer(code: str) -> str:
    """The last line that a Python process of its own prints: asked here, jax would take the card's memory."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return (done.stdout.splitlines() or [""])[-1]


if __name__ == "__main__":
    if sys.argv[1:2] == ["group"]:
        run_here(GROUPS[int(sys.argv[2])])
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "gpu.json")
