"""XLA's flags for training on GPUs, each with its reason.

    XLA_FLAGS="$(python -m omnijax.xla_flags)" python -m omnijax.train ...

XLA reads its flags once, before jax starts, and ends the process at one it does not know; hence text, and no call
that sets them. The list is short: what the two guides below advise for sharded layers in a scan, and XLA still knows.
On Triton's matrix products the guides disagree (JAX's example turns them on for all), so measure that one first.
"""

TOOLBOX = "NVIDIA's JAX-Toolbox guide to LLMs on GPUs"
TIPS = "JAX's GPU performance tips"

GPU_FLAGS = {
    "xla_gpu_enable_latency_hiding_scheduler=true": f"computes while collectives run ({TIPS}, {TOOLBOX})",
    "xla_gpu_enable_triton_gemm=false": f"matrix products by cuBLAS, not by XLA's Triton emitter ({TOOLBOX})",
    "xla_gpu_enable_pipelined_all_gather=true": f"gathers the next layer's parameters during this layer ({TOOLBOX})",
    "xla_gpu_enable_pipelined_reduce_scatter=true": f"sums the last layer's gradients during this one ({TOOLBOX})",
    "xla_gpu_enable_pipelined_all_reduce=true": f"the same for replicated parameters ({TOOLBOX})",
    "xla_gpu_enable_while_loop_double_buffering=true": f"overlaps a scan's layers, in two sets of buffers ({TOOLBOX})",
}

COMBINE_FLAGS = {
    "xla_gpu_all_gather_combine_threshold_bytes": f"one all-gather for a layer's parameters ({TIPS})",
    "xla_gpu_reduce_scatter_combine_threshold_bytes": f"one reduce-scatter for a layer's gradients ({TIPS})",
    "xla_gpu_all_reduce_combine_threshold_bytes": f"one all-reduce for a layer's replicated gradients ({TIPS})",
}


def gpu_flags(layer_bytes: int | None = None) -> str:
    """The flags as text for `XLA_FLAGS`, joined by spaces.

    `layer_bytes` is the size of one whole layer's parameters in the compute dtype. The guides ask for thresholds that
    combine at least one layer's collectives, which no fixed number does; without it they stay at XLA's default.
    """
    sized = [] if layer_bytes is None else [f"{flag}={layer_bytes}" for flag in COMBINE_FLAGS]
    return " ".join(f"--{flag}" for flag in [*GPU_FLAGS, *sized])


if __name__ == "__main__":
    print(gpu_flags())
