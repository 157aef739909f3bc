"""What `data.py` measures: rows made ready by OmniJAX's decoders, and by the same libraries as people call them.

A module of its own, as workers import it.
"""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile
import soxr
from PIL import Image
from tokenizers import Tokenizer

from omnijax.data.formats import FormatOptions, to_sample
from omnijax.data.media.audio import AudioLimits, load_audio
from omnijax.data.media.image import ImageLimits, load_image
from omnijax.data.media.video import VideoLimits, load_video
from omnijax.data.omni_packing import Item, MediaItem
from omnijax.data.rows import Rows

SIDE, FRAMES, RATE = 224, 8, 16000


def picture_of(pixels: np.ndarray, side: int) -> np.ndarray:
    return np.asarray(Image.fromarray(pixels).resize((side, side), Image.BICUBIC))


def scaled(pixels: np.ndarray) -> np.ndarray:
    return (pixels.astype(np.float32) / 255 - 0.5) / 0.5


def resize_frame(pixels: np.ndarray, count: int) -> np.ndarray:
    return picture_of(pixels, SIDE // 2)


@dataclass(frozen=True, eq=False)
class DecodedItems:
    """An item of each row: its medium as units, and as many tokens."""

    rows: Rows
    kind: str

    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Item:
        row = self.rows.row_id(index)
        sample = to_sample(self.rows[index], row, FormatOptions(root="/", outside_root=True))
        media = sample.parts[0].media
        assert media is not None
        if self.kind == "image":
            units = scaled(picture_of(load_image(media, ImageLimits(), row).pixels, SIDE))[None]
        elif self.kind == "video":
            limits = VideoLimits(max_frames=FRAMES, min_frames=FRAMES)
            units = scaled(load_video(media, limits, row, resize=resize_frame).frames)
        else:
            samples = load_audio(media, AudioLimits(sample_rate=RATE), row).samples
            units = np.pad(samples, (0, -len(samples) % RATE)).reshape(-1, RATE)
        count = len(units)
        numbers = np.arange(count, dtype=np.int32)
        grid, valid = np.ones((count, 3), np.int32), np.full(count, units[0].size, np.int32)
        item = MediaItem(units, numbers, grid, valid, numbers, count)
        return (
            Item(numbers, numbers > 0, str(row), media={self.kind: item})
            if count > 1
            else Item(
                np.zeros(2, np.int32),
                np.array([False, True]),
                str(row),
                media={self.kind: MediaItem(units, numbers, grid, valid, np.array([0, -1], np.int32), 1)},
            )
        )


class PeerDataset:
    """A map-style dataset as people write them: a row's line, and what it names, decoded."""

    def __init__(self, kind: str, file: Path):
        self.kind, self.folder, self.lines = kind, file.parent, file.read_text().splitlines()
        self.tokenizer: Tokenizer | None = None

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> np.ndarray:
        row = json.loads(self.lines[index])
        if self.kind == "text":
            self.tokenizer = self.tokenizer or Tokenizer.from_file(str(self.folder / "tokenizer.json"))
            return np.array(self.tokenizer.encode(row["text"]).ids, np.int32)
        content = Path(row["messages"][0]["content"][0][self.kind]).read_bytes()
        if self.kind == "image":
            return scaled(picture_of(np.asarray(Image.open(io.BytesIO(content)).convert("RGB")), SIDE))
        if self.kind == "video":
            with av.open(io.BytesIO(content)) as container:
                frames = list(container.decode(video=0))
            chosen = np.linspace(0, len(frames) - 1, FRAMES).round().astype(int)
            return scaled(np.stack([picture_of(frames[n].to_ndarray(format="rgb24"), SIDE // 2) for n in chosen]))
        samples, rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
        return soxr.resample(samples.mean(1), rate, RATE)
