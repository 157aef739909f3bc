"""Sound: any container, rate, depth and number of channels to mono float32 at one rate, a block at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

import av
import numpy as np
import soxr
from jaxtyping import Float32

from omnijax.data.media.opening import CUT_OFF, check_length, container, opened
from omnijax.data.refusal import Refusal
from omnijax.data.sample import MediaReference, RowId
from omnijax.fields import ranged

_Block = Float32[np.ndarray, "block"]
_GAP = 0.05  # seconds; shorter ones come from the rounding of timestamps


@dataclass(frozen=True)
class AudioLimits:
    """What sounds may be and become.

    sample_rate: Hz, of what is returned
    max_seconds: longest sound; no more than it is ever held in memory
    longer:      what becomes of a longer one: refused, or cut and noted as "cut"
    """

    sample_rate: int = ranged(16000, at_least=1)
    max_seconds: float = ranged(3600.0, above=0.0)
    longer: Literal["refuse", "cut"] = "refuse"


@dataclass(frozen=True)
class Sound:
    """A decoded sound.

    samples: full scale is -1..1; a channel's mean where there are several; sample i is heard at i / sample_rate
    notes:   what was done beside decoding, to be counted: "cut" (at max_seconds), "gaps" (filled with silence)
    """

    samples: Float32[np.ndarray, "samples"]
    sample_rate: int
    notes: tuple[str, ...]


def load_audio(reference: MediaReference, limits: AudioLimits, row: RowId) -> Sound:
    """Decode a sound file, or the first sound track of a video; raises `BadRow` where that is not possible."""
    with opened(reference, "audio", row) as file:
        return decode_track(file, limits)


def decode_track(file: BinaryIO, limits: AudioLimits, start: float | None = None) -> Sound:
    """Decode the first sound track of an open file.

    `start` is the moment, on the file's clock, of sample 0: a track that begins later is preceded by silence. By
    default sample 0 is the track's first. Raises `Refusal` for no track, no sample or a limit, and whatever PyAV does
    on damage.
    """
    most = round(limits.max_seconds * limits.sample_rate)
    notes: list[str] = []
    blocks, held = [], 0
    for block in _resampled(_mono(file, start, notes), limits.sample_rate):
        blocks.append(block)
        held += block.size
        if held > most:
            if limits.longer == "refuse":
                raise Refusal(f"is longer than max_seconds {limits.max_seconds}: raise it, or set longer to 'cut'")
            notes.append("cut")
            break
    if not held:
        raise Refusal(f"has not one sample at {limits.sample_rate} Hz: drop the row")
    return Sound(np.concatenate(blocks)[:most], limits.sample_rate, tuple(notes))


def _resampled(blocks: Iterator[tuple[_Block, int]], rate: int) -> Iterator[_Block]:
    stream = None
    for block, source_rate in blocks:
        if source_rate == rate:
            yield block
        else:
            stream = stream or soxr.ResampleStream(source_rate, rate, 1, dtype="float32", quality="HQ")
            yield stream.resample_chunk(block)
    if stream:
        yield stream.resample_chunk(np.zeros(0, np.float32), last=True)


def _mono(file: BinaryIO, start: float | None, notes: list[str]) -> Iterator[tuple[_Block, int]]:
    """Blocks of at most a second with their rate; silence stands where timestamps leave a gap."""
    packed = av.AudioResampler(format="flt")  # PyAV reads past the end of 8 and more planes
    rate, made = 0, 0
    for frame in _frames(file):
        if rate not in (0, frame.sample_rate):
            raise Refusal(f"changes its rate from {rate} to {frame.sample_rate} Hz: convert it or drop the row")
        rate = frame.sample_rate
        if frame.time is not None:
            start = frame.time if start is None else start
            missing = round((frame.time - start) * rate) - made
            if made and missing > _GAP * rate and "gaps" not in notes:
                notes.append("gaps")
            if not made or missing > _GAP * rate:
                for first in range(0, missing, rate):
                    yield np.zeros(min(rate, missing - first), np.float32), rate
                made += max(missing, 0)
        for plain in packed.resample(frame):
            channels = plain.layout.nb_channels
            mono = plain.to_ndarray().reshape(-1, channels) @ np.full(channels, 1 / channels, np.float32)
            if not np.isfinite(mono).all():
                raise Refusal("has samples that are not numbers: mend it or drop the row")
            for first in range(0, mono.size, rate):
                yield mono[first : first + rate], rate
            made += mono.size


def _frames(file: BinaryIO) -> Iterator[av.AudioFrame]:
    open_ended = _is_open_ended(file)
    with container(file) as streams:
        if not streams.streams.audio:
            raise Refusal("has no sound track: drop the row, or use it without sound")
        start = end = (streams.start_time or 0) / av.time_base
        for packet in streams.demux(streams.streams.audio[0]):
            if packet.is_corrupt and not open_ended:
                raise Refusal(CUT_OFF)
            for frame in packet.decode():
                end = (end if frame.time is None else frame.time) + frame.samples / frame.sample_rate
                yield frame
        if not streams.streams.video:  # else the file may last longer than its sound
            check_length(streams, end - start)


def _is_open_ended(file: BinaryIO) -> bool:
    """Whether a WAV file was written to a pipe: its header, written first, cannot know the length."""
    file.seek(0)
    head = file.read(8)
    return head[:4] == b"RIFF" and not 0 < int.from_bytes(head[4:], "little") < 0x7FFF0000
