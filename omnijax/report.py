"""What a run says of itself before it starts."""

import math
from collections.abc import Collection, Iterable, Mapping

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from omnijax.config import Compute, Optimizer
from omnijax.data.documents import Documents
from omnijax.data.evaluation import Evaluation
from omnijax.data.ngram import ngram_bits
from omnijax.data.packing import make_document
from omnijax.data.tokenizer import Tokenizer
from omnijax.nn.gpu import MAX_DOCUMENTS
from omnijax.parameters import describe
from omnijax.patterns import part_of
from omnijax.sharding import Placement

BYTES = 4  # of a float32 parameter


def mesh_text(mesh: Mesh) -> str:
    """One line: devices, processes, axes."""
    kind, processes = mesh.devices.flat[0].device_kind, jax.process_count()
    return f"{mesh.size} x {kind} in {processes} process{'es' * (processes > 1)}, {axes_text(mesh)}"


def axes_text(mesh: Mesh | AbstractMesh) -> str:
    """The axes that split anything, e.g. `data 4 x tensor 2`."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "no axis is split"


def bytes_per_device(placement: Placement, mesh: Mesh | AbstractMesh) -> int:
    """float32 bytes of one parameter on one device."""
    axes = [axis for entry in placement.spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)]
    return math.prod(placement.shape) * BYTES // math.prod(mesh.shape[axis] for axis in axes)


def sharding_text(
    placements: Mapping[str, Placement], mesh: Mesh | AbstractMesh, trained: Collection[str] | None = None
) -> str:
    """Parameters in all, bytes per device, and every alternative a table line had to take.

    `trained` are the paths of those that the optimizer has moments of, if not of all.
    """
    count = sum(math.prod(each.shape) for each in placements.values())
    held = sum(bytes_per_device(each, mesh) for each in placements.values())
    moments = sum(bytes_per_device(each, mesh) for path, each in placements.items() if trained and path in trained)
    share = held / (count * BYTES)
    more = f"{moments / 2**20:,.2f} MiB more" if trained and len(trained) < len(placements) else "as much again"
    lines = [
        f"parameters: {count:,}; {held / 2**20:,.2f} MiB of float32 a device ({share:.1%} of all), "
        f"{more} for each of the optimizer's two moments"
    ]
    return "\n".join(lines + alternatives(placements.items()))


def trained_text(model: nnx.Module) -> str:
    """How many parameters of each part of a model are trained and frozen."""
    counts: dict[str, list[int]] = {}
    for path, each in describe(model).items():
        counts.setdefault(part_of(path), [0, 0])[bool(each.frozen)] += math.prod(each.shape)
    rows = [("part", "trained", "frozen"), *((part, *(f"{n:,}" for n in pair)) for part, pair in counts.items())]
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(
        f"  {part:<{first}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, others, strict=True))
        for part, *cells in rows
    )


def alternatives(placements: Iterable[tuple[str, Placement]]) -> list[str]:
    """A line for every alternative of the table that named arrays had to take."""
    taken: dict[str, dict[str, None]] = {}
    for name, placement in placements:
        for fallback in placement.fallbacks:
            taken.setdefault(fallback, {})[name] = None
    return [f"  alternative taken: {what} ({shorten(list(names))})" for what, names in taken.items()]


def shorten(names: list[str]) -> str:
    """The first name, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def compute_text(compute: Compute, kernel: str, peak: float | None, experts: str | None = None) -> str:
    """Kernel choices, and how speed is counted; `experts` is the kernel of a model's experts, if it has any."""
    mfu = f"MFU of {peak / 1e12:g} TFLOP/s a device" if peak else "no MFU: set Run.peak_tflops for this device"
    # Whether cuDNN can express a span shows only when the program runs: what it leaves to blockwise is said here.
    if kernel == "cudnn":
        kernel += f" (blockwise for windows, and where a row has over {MAX_DOCUMENTS} documents and gaps)"
    if experts:
        kernel += f"; experts' kernel {experts}"
    return (
        f"compute: {compute.dtype}, parameters float32; attention kernel {kernel}; remat {compute.remat}; "
        f"{compute.accumulation} micro-batch{'es' * (compute.accumulation > 1)} a step\n"
        f"speed: 3 x forward, less of what is frozen, causal pairs within documents, no recomputation or padding; {mfu}"
    )


def warm_up_text(optimizer: Optimizer, steps: int) -> str:
    """A warning where the warm-up leaves no step to the schedule; "" where it does. A short trial run may want that."""
    warm_up = optimizer.warmup_steps
    if warm_up < steps:
        return ""
    return (
        f"warning: the learning rate warms up until the end: Optimizer.warmup_steps = {warm_up}, Run.steps = {steps}; "
        f"it reaches {optimizer.learning_rate * steps / warm_up:g} of {optimizer.learning_rate:g}"
    )


def left_out(evaluations: Iterable[Evaluation]) -> list[str]:
    """A line for each held-out row that was left out, and for how many were too long."""
    lines = []
    for each in evaluations:
        lines += [f"left out of the held-out text: {error}" for error in each.bad]
        if each.long:
            lines.append(f"held out: {each.long} chats are longer than a row: dropped or cut, as Data.over_length says")
    return lines


def ngram_yardsticks(
    orders: Iterable[int], train: Documents, heldout: Documents, tokenizer: Tokenizer
) -> dict[str, float]:
    """Held-out nats per token of n-gram models of the training text, by name: what counting alone achieves."""
    trained, held = (_tokens(documents, tokenizer) for documents in (train, heldout))
    return {f"{order}-gram": ngram_bits(trained, held, order, tokenizer.vocab_size) * math.log(2) for order in orders}


def bits_per_byte(nats_per_token: float, evaluation: Evaluation) -> float:
    """Held-out nats a predicted token as bits a byte of the held-out text."""
    predicted = sum(float(rows.arrays["weights"].sum()) for rows in evaluation.steps)
    return nats_per_token * predicted / math.log(2) / evaluation.bytes


def _tokens(documents: Documents, tokenizer: Tokenizer) -> np.ndarray:
    return np.concatenate(
        [make_document(documents[i], documents.row_id(i), tokenizer).tokens for i in range(len(documents))]
    )
