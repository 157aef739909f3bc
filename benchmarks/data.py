"""The data stream against a torch DataLoader that does the same work with the same decoders, two workers each.

pip install -e '.[peer]' soundfile && python benchmarks/data.py [text image video audio]

Text is tokenized and packed; pictures, clips and sounds are decoded, resized or resampled, and packed. The two take
turns; the packer's share is what packing adds to making the items, in one process.
"""

import json
import pydoc_data.topics
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile
from data_rows import FRAMES, RATE, SIDE, DecodedItems, PeerDataset
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from omnijax.data.budgets import Budgets
from omnijax.data.documents import Table
from omnijax.data.items import TextItems
from omnijax.data.mixture import Deal
from omnijax.data.omni_packing import FirstFit
from omnijax.data.packing import ConcatenateAndSplit, Packer
from omnijax.data.rows import open_rows
from omnijax.data.shards import Pipeline
from omnijax.data.sources import JsonLines
from omnijax.data.stream import ExactStream
from omnijax.data.tokenizer import TokenizerFile
from omnijax.units import UnitShape

WORKERS, STEP, ROUNDS = 2, 8, 3
ROWS = {"text": 20000, "image": 600, "video": 80, "audio": 300}
MEASURED = {"text": 4000, "image": 400, "video": 60, "audio": 300}  # rows of each round, once workers run
LENGTH = 2048
UNITS = {"image": (SIDE, SIDE, 3), "video": (SIDE // 2, SIDE // 2, 3), "audio": (RATE,)}
PER_ITEM = {"image": 1, "video": FRAMES, "audio": 5}


def write_data(kind: str, folder: Path) -> Path:
    """Rows as users have them, in one jsonl file; media in files of their own, of real sizes."""
    random = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    if kind == "text":
        prose = " ".join(pydoc_data.topics.topics.values())
        starts = random.integers(0, len(prose) - 4000, ROWS[kind])
        rows = [
            {"text": prose[start : start + int(size)]}
            for start, size in zip(starts, random.integers(200, 4000, len(starts)), strict=True)
        ]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=4096, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
        )
        tokenizer.train_from_iterator([prose], trainer)
        tokenizer.save(str(folder / "tokenizer.json"))
    for number in range(ROWS[kind] if kind != "text" else 0):
        path = folder / f"{number}.{ {'image': 'jpg', 'video': 'mp4', 'audio': 'wav'}[kind] }"
        {"image": write_picture, "video": write_clip, "audio": write_sound}[kind](path, random)
        rows.append({"messages": [{"role": "user", "content": [{"type": kind, kind: str(path)}]}]})
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def smooth(random: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Large blobs of colour with some noise: it compresses as a photograph does."""
    small = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
    return np.clip(np.asarray(small, np.int16) + random.integers(-8, 9, (height, width, 1)), 0, 255).astype(np.uint8)


def write_picture(path: Path, random: np.random.Generator) -> None:
    Image.fromarray(smooth(random, 480, 640)).save(path, quality=90)


def write_clip(path: Path, random: np.random.Generator) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
        first = smooth(random, 240, 320)
        for shift in range(10 * FRAMES // 2):
            frame = av.VideoFrame.from_ndarray(np.roll(first, 4 * shift, axis=1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def write_sound(path: Path, random: np.random.Generator) -> None:
    """Tones that come and go, with some noise."""
    moments = np.arange(5 * 44100) / 44100
    pitch, tempo, side = random.uniform(100, 400), random.uniform(1, 4), np.array([0.0, 1.0])
    tones = np.sin(2 * np.pi * pitch * moments) * np.sin(np.pi * tempo * moments) ** 2
    sound = 0.4 * tones[:, None] * (1 - 0.5 * side) + random.normal(0, 0.005, (moments.size, 2))
    soundfile.write(path, sound.astype(np.float32), 44100)


def pipeline_of(kind: str, file: Path) -> Pipeline:
    """Text in rows of `LENGTH` tokens; of media, one item a row, as the peer's batches have one a row."""
    items: Any
    packer: Packer
    if kind == "text":
        tokenizer = TokenizerFile(str(file.parent / "tokenizer.json"), eos="<|end|>")
        items, packer = TextItems(JsonLines(str(file)).open(), tokenizer), ConcatenateAndSplit(LENGTH)
    else:
        items = DecodedItems(open_rows(str(file), name=kind, index_cache=None), kind)
        tokens = max(2, PER_ITEM[kind])
        packer = FirstFit(Budgets(tokens, {kind: PER_ITEM[kind]}), {kind: UnitShape(UNITS[kind])}, look_ahead=1)
    deal = Deal((len(items),), STEP, 0, names=(kind,), weights=(1.0,), epochs=(None,), by="rows")
    return Pipeline((items,), deal, packer, STEP)


def ours(kind: str, file: Path) -> Iterator[int]:
    """How many rows of data each step used."""
    stream = ExactStream(pipeline_of(kind, file), workers=WORKERS, prefetch=2)
    try:
        for rows in stream:
            yield sum(len(ids) for ids in rows.row_ids)
    finally:
        stream.close()


def as_they_are(samples: list[np.ndarray]) -> list[np.ndarray]:
    return samples


def theirs(kind: str, file: Path) -> Iterator[int]:
    """How many rows of data each batch used; text is packed as it comes, end to end."""
    import torch
    from torch.utils.data import DataLoader

    options = {"num_workers": WORKERS, "prefetch_factor": 2, "shuffle": True, "multiprocessing_context": "spawn"}
    dataset: Any = PeerDataset(kind, file)
    if kind != "text":
        while True:
            for batch in DataLoader(dataset, batch_size=STEP, **options):
                yield len(batch)
    while True:
        held, rows = np.zeros(0, np.int32), 0
        for batch in DataLoader(dataset, batch_size=64, collate_fn=as_they_are, **options):
            held, rows = np.concatenate([held, *batch]), rows + len(batch)
            while held.size > STEP * LENGTH:
                torch.from_numpy(held[: STEP * LENGTH].reshape(STEP, LENGTH))
                held = held[STEP * LENGTH :]
                yield rows
                rows = 0


def rate(make: Callable[[], Iterator[int]], wanted: int) -> float:
    """Rows a second from the fifth step on, when workers run and what they made ahead is used up."""
    steps = make()
    for _ in range(4):
        next(steps)
    start, rows = time.perf_counter(), 0
    while rows < wanted:
        rows += next(steps)
    seconds = time.perf_counter() - start
    steps.close()  # type: ignore[attr-defined]
    return rows / seconds


def packer_share(kind: str, file: Path, rows: int) -> float:
    """What packing adds, as a share of all: rows are packed from items that are at hand, and the items timed apart."""
    pipeline = pipeline_of(kind, file)
    items: Table[Any, Any] = pipeline.items[0]  # type: ignore[assignment]
    start = time.perf_counter()
    held = [items[index] for index in range(rows)]
    making = time.perf_counter() - start
    state: dict[str, Any] = {}
    start = time.perf_counter()
    while True:
        row, state = pipeline.packer.next_row(lambda number: held[number] if number < rows else None, state)
        if not row.row_ids:
            break
    packing = time.perf_counter() - start
    return packing / (making + packing)


def compare(kind: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        file = write_data(kind, Path(name))
        size = sum(path.stat().st_size for path in Path(name).iterdir() if path.suffix != ".json")
        if kind != "text":
            size -= file.stat().st_size
        each = size / ROWS[kind] / 1e6
        rates: dict[str, list[float]] = {"OmniJAX": [], "torch": []}
        for _ in range(ROUNDS):
            for peer, make in (("torch", theirs), ("OmniJAX", ours)):
                rates[peer].append(rate(partial(make, kind, file), MEASURED[kind]))
        middle = {peer: statistics.median(found) for peer, found in rates.items()}
        share = packer_share(kind, file, min(ROWS[kind], 1000 if kind == "text" else 60))
        words = ", ".join(f"{peer} {x:.0f} rows/s {x * each:.1f} MB/s" for peer, x in middle.items())
        print(f"{kind}: {words}: {middle['OmniJAX'] / middle['torch']:.2f}x; the packer is {share:.1%}", flush=True)


if __name__ == "__main__":
    for kind in sys.argv[1:] or ROWS:
        compare(kind)
