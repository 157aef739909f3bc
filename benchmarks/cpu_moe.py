"""Mixtures of experts on the CPU: a train step against transformers + torch, and the layer alone by number of experts.

pip install -e '.[peer]' && python benchmarks/cpu_moe.py          the step
python benchmarks/cpu_moe.py layer                                the layer
"""

import functools
import statistics
import sys
import time

from peers import Setup, main

from omnijax.nn.router import RouterLoss

SETUP = Setup(
    "qwen3_moe",
    {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "moe_intermediate_size": 256,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    options={"router_loss": RouterLoss(coefficient=0.0)},  # as transformers has it where no router logits are asked for
    torch_options={"experts_implementation": "grouped_mm"},
)
TOKENS, EXPERTS, REPEATS = 8192, (16, 32, 64, 128), 15


def layer() -> None:
    """Forward and backward of one layer of experts, in turns: medians, and their ratio to that of the fewest."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from models.layers import GatedExperts
    from omnijax import parameters
    from omnijax.nn.moe import MixtureOfExperts
    from omnijax.nn.router import Router, softmax_then_top

    x, real = jax.random.normal(jax.random.key(0), (16, TOKENS // 16, 256)), jnp.ones((16, TOKENS // 16), bool)
    runs = {}
    for experts in EXPERTS:
        rngs, select = nnx.Rngs(0), functools.partial(softmax_then_top, top_k=4, renormalise=True)
        router = Router(width=256, experts=experts, std=0.02, select=select, rngs=rngs)
        weights = GatedExperts(width=256, hidden=256, experts=experts, std=0.02, rngs=rngs)
        graphdef, params = parameters.split(MixtureOfExperts(router=router, experts=weights))

        def loss(params, x, graphdef=graphdef):
            y, _ = parameters.merge(graphdef, params)(x, real)
            return (y * x).sum()

        runs[experts] = functools.partial(jax.jit(jax.grad(loss, argnums=(0, 1))), params, x)
    seconds: dict[int, list[float]] = {experts: [] for experts in runs}
    for turn in range(REPEATS + 1):
        for experts, run in runs.items():
            since = time.perf_counter()
            jax.block_until_ready(run())
            if turn:
                seconds[experts].append(time.perf_counter() - since)
    fewest = statistics.median(seconds[EXPERTS[0]])
    for experts, times in seconds.items():
        median = statistics.median(times)
        print(f"{experts:4} experts: {median * 1e3:6.0f} ms, min {min(times) * 1e3:6.0f}, {median / fewest:.2f}x")


if __name__ == "__main__":
    if sys.argv[1:] == ["layer"]:
        layer()
    else:
        main(SETUP)
