"""How a train step grows with the length of its row: memory to 64K tokens, time to 16K, on the CPU.

    python benchmarks/context.py

A small Qwen3 with blockwise attention, one row that is one document, float32, AdamW, full rematerialisation. Memory is
what the compiled program asks for beside its arguments (`memory_analysis`), so long rows cost no time. Printed: a
table, and the exponents of memory and time in the length, fitted over the last four lengths of each.
"""

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from models.qwen3 import Qwen3Config
from omnijax import parameters, sharding
from omnijax.batch import Batch
from omnijax.mesh import make_mesh
from omnijax.nn.attention import use_kernel
from omnijax.step import init_state, train_step
from sharding_rules import qwen3 as rules

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
LENGTHS = tuple(1024 * 2**power for power in range(7))
TIMED, STEPS = 16384, 3


def main() -> None:
    results = measure(SIZES, LENGTHS, timed=TIMED, steps=STEPS)
    print(f"Qwen3 {SIZES}, one document a row, float32, AdamW, remat full")
    print(f"{'length':>8}{'temporary MiB':>15}{'KiB a token':>13}{'s/step':>9}{'tokens/s':>10}")
    for each in results:
        length, held, seconds = each["length"], each["bytes"], each.get("seconds")
        speed = f"{seconds:>9.2f}{length / seconds:>10.0f}" if seconds else ""
        print(f"{length:>8}{held / 2**20:>15.1f}{held / length / 1024:>13.2f}{speed}")
    for what, name in (("memory", "bytes"), ("time", "seconds")):
        points = [(each["length"], each[name]) for each in results if name in each]
        print(f"{what} grows with length ** {exponent(points[-4:]):.3f}")


def measure(sizes: dict[str, Any], lengths: Sequence[int], *, timed: int, steps: int) -> list[dict[str, Any]]:
    """Bytes of temporaries of a step for rows of every length, and its median seconds for those of at most `timed`."""
    config, table, mesh = Qwen3Config(**sizes), rules.table(), make_mesh(data=1, devices=jax.devices()[:1])
    optimizer, results = optax.adamw(1e-4, b1=0.9, b2=0.95, weight_decay=0.1), []
    with sharding.use(mesh, table), use_kernel("blockwise"):
        model = parameters.build_model(config, mesh, table, remat="full")
        state = init_state(model, optimizer, mesh, table)
        step = train_step(model, optimizer, mesh, table, dtype=jnp.dtype("float32"))
        for length in lengths:
            batch = row(length, config.vocab_size, NamedSharding(mesh, PartitionSpec()))
            compiled = step.lower(state, batch).compile()
            results.append({"length": length, "bytes": compiled.memory_analysis().temp_size_in_bytes})
            if length <= timed:
                seconds = []
                for _ in range(steps):
                    since = time.perf_counter()
                    state, report = compiled(state, batch)
                    jax.block_until_ready(report)
                    seconds.append(time.perf_counter() - since)
                results[-1]["seconds"] = statistics.median(seconds)
    return results


def row(length: int, vocabulary: int, place: NamedSharding) -> Batch:
    """One row of random tokens, all of one document."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, (1, length), dtype=np.int32)
    positions, ones = np.arange(length, dtype=np.int32)[None], np.ones_like(tokens)
    arrays = (tokens, ones, positions, np.roll(tokens, -1, axis=1), ones.astype(np.float32), 0 * ones)
    return Batch(*(jax.device_put(array, place) for array in arrays))


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """p of the curve length ** p that fits these points best, in logarithms."""
    length, value = np.log(np.asarray(points, np.float64)).T
    return float(np.polyfit(length, value, 1)[0])


if __name__ == "__main__":
    main()
