"""A vision-language train step on the CPU: packed rows of text, pictures and clips, against padded batches in torch.

pip install -e '.[peer]' && python benchmarks/cpu_omni.py

A step of both has the same samples and the same labels. Ours are packed into rows by `FirstFit`, with one program for
any mix. In torch (eager, SDPA) they are padded to the longest of a batch: all at once, or sorted by length in as many
batches as `GROUPS` says, whose gradients are added up; the fastest counts. Making the rows is not timed.
"""

import base64
import dataclasses
import io
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from peers import LEARNING_RATE, ROUNDS, STEPS, THREADS, alternate, environment, serve

ROWS, LENGTH, UNITS = 4, 512, 640
GROUPS = (1, 2, 4)
NAMES = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def main() -> None:
    role, *rest = sys.argv[1:] or [""]
    if not role:
        compare()
    elif role == "prepare":
        prepare(Path(rest[0]))
    elif role == "omnijax":
        omnijax_worker(Path(rest[0]))
    else:
        torch_worker(Path(rest[0]), int(role.removeprefix("torch ")))


def compare() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, sys.argv[0], "prepare", folder], check=True, env=environment())
        about = json.loads((Path(folder) / "about.json").read_text())
        found = alternate(("omnijax", *(f"torch {groups}" for groups in GROUPS)), folder)
    print(f"Qwen2.5-VL, {ROWS} x {LENGTH} tokens and {UNITS} patches a row, float32, AdamW, {THREADS} threads,")
    print(f"{ROUNDS} x {STEPS} steps each; {about}")
    print(f"{'':10}{'samples/s':>10}{'ms/step':>10}{'min ms':>10}{'core ms':>10}{'peak MiB':>10}{'losses':>10}")
    means, cores = {}, {}
    for name, each in found.items():
        # Steps are not all alike, but each side has the same ones in every turn.
        means[name], cores[name] = (
            statistics.mean(statistics.median(turns) for turns in zip(*times, strict=True))
            for times in (each.seconds, each.busy)
        )
        least = statistics.mean(min(turns) for turns in zip(*each.seconds, strict=True))
        times = "".join(f"{seconds * 1e3:>10.0f}" for seconds in (means[name], least, cores[name]))
        losses = f"{each.losses[0]:>10.5f}{each.losses[-1]:>10.5f}"
        print(f"{name:10}{about['samples a step'] / means[name]:>10.1f}{times}{each.peak_bytes / 2**20:>10.0f}{losses}")
    for what, values in (("samples/s", means), ("by the time that cores worked", cores)):
        best = min((name for name in values if name != "omnijax"), key=values.__getitem__)
        print(f"{what}, omnijax / {best}: {values[best] / values['omnijax']:.3f}")


# What both train on


def model_config() -> Any:
    """The proportions of Qwen2.5-VL-3B, whose tower is 0.63 times as wide as its language model and about as deep."""
    from models.qwen2_5_vl import Qwen2_5VLConfig, Qwen2_5VLTextConfig
    from models.vision.qwen2_5_vl import Qwen2_5VLVisionConfig
    from omnijax.nn.rope import MultimodalRope

    text = Qwen2_5VLTextConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_scaling=MultimodalRope((8, 12, 12)),
        tie_word_embeddings=True,
    )
    vision = Qwen2_5VLVisionConfig(
        depth=4,
        num_heads=4,
        hidden_size=160,
        intermediate_size=432,
        out_hidden_size=256,
        fullatt_block_indexes=(1, 3),
        tokens_per_second=2,
    )
    ids = {"image_token_id": 261, "video_token_id": 262, "vision_start_token_id": 259, "vision_end_token_id": 260}
    return Qwen2_5VLConfig(text, vision, **ids)


def rows(count: int) -> Iterator[dict[str, Any]]:
    """Chats: a quarter of text alone, one in eight about a clip, the others about a picture."""
    from PIL import Image

    random = np.random.default_rng(0)

    def words(least: int, most: int) -> str:
        return " ".join(["many", "a", "picture", "of", "some", "thing"][n] for n in random.integers(0, 6, most)[:least])

    def picture(height: int, width: int) -> str:
        file = io.BytesIO()
        coarse = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((width, height)).save(file, "PNG")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

    for number in range(count):
        question: list[dict[str, Any]] = [{"type": "text", "text": words(int(random.integers(3, 12)), 12)}]
        answer = words(int(random.integers(4, 24)), 24)
        if number % 8 == 0:
            size = random.integers(5, 7, 2) * 28
            question.insert(0, {"type": "video", "video": [picture(*size) for _ in range(random.integers(4, 9))]})
        elif number % 4 == 1:
            answer = words(int(random.integers(20, 80)), 80)
        else:
            question.insert(0, {"type": "image", "image": picture(*random.integers(5, 13, 2) * 28)})
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def prepare(folder: Path) -> None:
    """Random weights as a Hugging Face folder, and the packed rows of `STEPS` steps."""
    import jax

    from models.vision.processor import Qwen2_5VLProcessor
    from omnijax import hf
    from omnijax.config import Data
    from omnijax.data.chat_source import Chat
    from omnijax.data.media.video import VideoLimits
    from omnijax.data.mixture import open_members
    from omnijax.data.pipeline import make_pipeline
    from omnijax.data.stream import ExactStream
    from omnijax.data.tokenizer import Bytes
    from omnijax.mesh import make_mesh
    from omnijax.parameters import build_model
    from sharding_rules.qwen2_5_vl import table

    hf.save(
        build_model(model_config(), make_mesh(data=1, devices=jax.devices()[:1]), table(), seed=0), folder / "model"
    )
    with open(folder / "chats.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(256))
    processor = Qwen2_5VLProcessor(video=VideoLimits(min_pixels=3136))
    source = Chat(str(folder / "chats.jsonl"), processor=processor, index_cache=None)
    data = Data(source, Bytes(NAMES), LENGTH, ROWS, shards=1, units={"image": UNITS})
    stream = ExactStream(make_pipeline(data, open_members(source)[0], 0))
    steps = [next(stream) for _ in range(STEPS)]
    for number, step in enumerate(steps):
        np.savez(folder / f"{number}.npz", **step.arrays)
    fill = {name: statistics.mean(step.metrics[f"fill/{name}"] for step in steps) for name in ("tokens", "image")}
    count = statistics.mean(sum(map(len, step.row_ids)) for step in steps)
    about = {"samples a step": count} | {f"fill of {name}": round(share, 3) for name, share in fill.items()}
    (folder / "about.json").write_text(json.dumps(about | {"padding in torch": padding(folder)}))


def arrays_of(folder: Path, number: int) -> dict[str, np.ndarray]:
    with np.load(folder / f"{number % STEPS}.npz") as arrays:
        return dict(arrays)


# Ours


def omnijax_worker(folder: Path) -> None:
    import jax
    import jax.numpy as jnp
    import optax

    import models
    from omnijax import hf, sharding
    from omnijax.mesh import make_mesh
    from omnijax.step import init_state, put_batch, train_step
    from sharding_rules.qwen2_5_vl import table

    mesh, rules, at = make_mesh(data=1, devices=jax.devices()[:1]), table(), folder / "model"
    model = hf.load(models.family_of(at), at, mesh=mesh, rules=rules, remat="dots")
    optimizer = optax.adamw(LEARNING_RATE, b1=0.9, b2=0.95, weight_decay=0.1)
    batches = [arrays_of(folder, number) for number in range(STEPS)]
    with sharding.use(mesh, rules):
        state = [init_state(model, optimizer, mesh, rules)]
        compiled = train_step(model, optimizer, mesh, rules, dtype=jnp.dtype("float32"))

        def step(number: int) -> float:
            state[0], report = compiled(state[0], put_batch(batches[number % STEPS], mesh, rules))
            return float(report["loss"])

        serve(step)


# The same samples, one a row


@dataclasses.dataclass
class Single:
    """A sample as transformers takes it: patches in merge order, and what is no label is -100."""

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    patches: np.ndarray
    grid: tuple[int, int, int] | None


def samples_of(arrays: dict[str, np.ndarray]) -> list[Single]:
    """The documents of packed rows; each has at most one picture or clip here."""
    from models.vision.patches import merge_positions, window_order

    found, vision = [], model_config().vision_config
    for row in range(ROWS):
        segments, units = arrays["segment_ids"][row], arrays["media.image.unit_segments"][row]
        for segment in range(1, segments.max() + 1):
            here, own = segments == segment, units == segment
            tokens, labels = arrays["tokens"][row][here].astype(np.int64), np.full(here.sum(), -100, np.int64)
            weights = arrays["weights"][row][here][:-1] > 0
            labels[1:][weights] = tokens[1:][weights]
            patches, grid = arrays["media.image.features"][row][own], None
            if len(patches):
                grid = tuple(arrays["media.image.unit_grid"][row][own][0].tolist())
                order = window_order(merge_positions(grid, vision.spatial_merge_size), vision.window)
                patches = patches[np.argsort(order)]
            found.append(Single(tokens, labels, arrays["positions"][row][here], patches, grid))
    return found


def batches_of(samples: list[Single], groups: int) -> list[list[Single]]:
    """So many batches of samples of about one length."""
    ordered = sorted(samples, key=lambda sample: len(sample.tokens)) if groups > 1 else samples
    bounds = [len(samples) * number // groups for number in range(groups + 1)]
    return [ordered[first:end] for first, end in itertools.pairwise(bounds)]


def padding(folder: Path) -> dict[int, float]:
    """The share of tokens that is padding, by the number of batches."""
    shares = {}
    for groups in GROUPS:
        real = whole = 0
        for number in range(STEPS):
            for batch in batches_of(samples_of(arrays_of(folder, number)), groups):
                lengths = [len(sample.tokens) for sample in batch]
                real, whole = real + sum(lengths), whole + max(lengths) * len(lengths)
        shares[groups] = round(1 - real / whole, 3)
    return shares


def torch_worker(folder: Path, groups: int) -> None:
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="sdpa"
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)

    def padded(batch: list[Single]) -> dict[str, Any]:
        length = max(len(sample.tokens) for sample in batch)
        shape = (len(batch), length)
        arrays = {"input_ids": np.zeros(shape, np.int64), "attention_mask": np.zeros(shape, np.int64)}
        arrays["labels"], positions = np.full(shape, -100, np.int64), np.zeros((3, *shape), np.int64)
        for row, sample in enumerate(batch):
            own = slice(len(sample.tokens))
            arrays["input_ids"][row, own], arrays["labels"][row, own] = sample.tokens, sample.labels
            arrays["attention_mask"][row, own], positions[:, row, own] = 1, sample.positions.T
        media = [sample for sample in batch if sample.grid]
        for video, pixels, name in ((0, "pixel_values", "image"), (1, "pixel_values_videos", "video")):
            if chosen := [sample for sample in media if (sample.grid[0] > 1) == video]:
                arrays[pixels] = np.concatenate([sample.patches for sample in chosen])
                arrays[f"{name}_grid_thw"] = np.array([sample.grid for sample in chosen])
        return {name: torch.tensor(x) for name, x in (arrays | {"position_ids": positions}).items()}

    steps = []
    for number in range(STEPS):
        samples = samples_of(arrays_of(folder, number))
        labels = sum((sample.labels >= 0).sum() for sample in samples)
        steps.append((torch.tensor(int(labels)), [padded(batch) for batch in batches_of(samples, groups)]))

    def step(number: int) -> float:
        labels, batches = steps[number % STEPS]
        optimizer.zero_grad()
        total = 0.0
        for inputs in batches:
            loss = model(**inputs, num_items_in_batch=labels).loss
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    serve(step)


if __name__ == "__main__":
    main()
