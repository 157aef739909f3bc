"""The pictures of a video file.

A file is read twice. The first time nothing is decoded: its packets say when each picture is shown, whatever the header
claims about rate and number. The second time only the stretches between key frames that hold a wanted picture are
decoded, and only wanted pictures are made RGB.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import av
import av.container
import av.stream
import av.video.stream
import numpy as np
from jaxtyping import Float64, Int64, UInt8

from omnijax.data.media.opening import CUT_OFF, check_length, container
from omnijax.data.refusal import Refusal


@dataclass(frozen=True, eq=False)
class Clip:
    """When the pictures of a clip are shown.

    times:     in seconds, in order
    duration:  seconds from the first picture to the end of the last
    stamps:    the same as the file writes them; None: it does not, and pictures are known by their number
    stretches: the stretch, from one key frame to the next, that each picture stands in
    keys:      the stamp of each stretch's key frame
    start:     what moment 0 is on the file's clock, in seconds
    has_sound: whether there is a sound track beside the pictures
    """

    times: Float64[np.ndarray, "frames"]
    duration: float
    stamps: Int64[np.ndarray, "frames"] | None = None
    stretches: Int64[np.ndarray, "frames"] | None = None
    keys: Int64[np.ndarray, "stretches"] | None = None
    start: float = 0.0
    has_sound: bool = False


def read_clip(file: BinaryIO, check_size: Callable[[int, int], None], notes: list[str]) -> Clip:
    """Read when the pictures of a file are shown; `check_size(height, width)` may refuse it.

    Notes "late start" where pictures before the first key frame cannot be decoded. Raises `Refusal` for a file without
    pictures or one that was cut off, and whatever PyAV does on damage.
    """
    shown: dict[int, int] = {}  # the stretch of each stamp
    keys: list[int] = []
    silent = False
    with container(file) as streams:
        stream = _picture_stream(streams)
        check_size(stream.height, stream.width)
        start = end = (streams.start_time or 0) / av.time_base
        length = 0
        for packet in streams.demux():
            if packet.is_corrupt:
                raise Refusal(CUT_OFF)
            if packet.pts is not None and packet.time_base is not None:
                end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            if packet.stream_index == stream.index and packet.size:
                if packet.pts is None:
                    silent = True
                    continue
                keys += [packet.pts] if packet.is_keyframe else []
                if not packet.is_discard:
                    shown[packet.pts] = len(keys) - 1
                    length = packet.duration or 0
        check_length(streams, end - start)
        unit, has_sound = float(stream.time_base or 0), bool(streams.streams.audio)
        reorders = streams.format.name == "avi" and stream.codec_context.has_b_frames
    if silent or (reorders and list(shown) == sorted(shown)):
        # Raw streams have no stamps, and those of AVI count packets as they are decoded, not as they are shown.
        return _count_clip(file, start, has_sound)
    stamps = np.array(sorted(stamp for stamp in shown if not keys or stamp >= keys[0]), np.int64)
    if not stamps.size:
        raise Refusal("has no picture: drop the row")
    if stamps.size < len(shown):
        notes.append("late start")
    times = stamps * unit
    start = min(start, float(times[0]))
    lasts = np.median(np.diff(times)) if times.size > 1 else length * unit
    stretches = np.array([shown[stamp] for stamp in stamps.tolist()], np.int64)
    duration = float(times[-1] - times[0] + lasts)
    return Clip(times - start, duration, stamps, stretches, np.array(keys, np.int64), start, has_sound)


def _count_clip(file: BinaryIO, start: float, has_sound: bool) -> Clip:
    """A clip whose file does not say when pictures are shown: they are counted, and evenly spaced."""
    with container(file) as streams:
        stream = _picture_stream(streams)
        rate = stream.average_rate or stream.guessed_rate
        count = sum(1 for _ in streams.decode(stream))
    if not rate or not count:
        raise Refusal("states neither when its pictures are shown nor how many a second: convert it or drop the row")
    return Clip(np.arange(count) / float(rate), count / float(rate), start=start, has_sound=has_sound)


def decode_pictures(
    file: BinaryIO, clip: Clip, chosen: Int64[np.ndarray, "chosen"], notes: list[str]
) -> Iterator[UInt8[np.ndarray, "H W 3"]]:
    """The pictures `chosen` of a clip, in rising order, as they are decoded; upright, which is noted as "rotated"."""
    wanted = (chosen if clip.stamps is None else clip.stamps[chosen]).tolist()
    found = 0
    with container(file) as streams:
        stream = _picture_stream(streams)
        for number, frame in enumerate(_decode(streams, stream, _stretches_for(clip, chosen))):
            if (number if clip.stamps is None else frame.pts) != wanted[found]:
                continue
            if frame.is_corrupt:
                break
            picture = frame.to_ndarray(format="rgb24")
            if frame.rotation:
                notes.append("rotated")
                picture = np.rot90(picture, round(frame.rotation / 90))
            yield picture
            found += 1
            if found == len(wanted):
                return
    raise Refusal(f"has no decodable picture at {clip.times[chosen[found]]:.2f} s: mend it or drop the row")


def _stretches_for(clip: Clip, chosen: Int64[np.ndarray, "chosen"]) -> set[int] | None:
    """The stretches to decode; None: all."""
    if clip.stamps is None or clip.stretches is None or clip.keys is None:
        return None
    needed = set(clip.stretches[chosen].tolist())
    # A picture shown before the key frame of its stretch is made from the stretch before as well.
    return needed | {
        stretch - 1
        for stamp, stretch in zip(clip.stamps[chosen].tolist(), clip.stretches[chosen].tolist(), strict=True)
        if stretch > 0 and stamp < clip.keys[stretch]
    }


def _decode(
    streams: av.container.InputContainer, stream: av.video.stream.VideoStream, needed: set[int] | None
) -> Iterator[av.VideoFrame]:
    """The decoded pictures of the `needed` stretches, in the order they are shown."""
    if needed is None:
        yield from streams.decode(stream)
        return
    stretch, running = -1, False
    for packet in streams.demux(stream):
        stretch += bool(packet.is_keyframe and packet.size)
        if stretch in needed and packet.size:
            running = True
            yield from packet.decode()
        elif running:  # here and at the end: what is still inside the decoder
            running = False
            yield from stream.codec_context.decode(None)
            stream.codec_context.flush_buffers()


def _picture_stream(streams: av.container.InputContainer) -> av.video.stream.VideoStream:
    for stream in streams.streams.video:
        if not stream.disposition & av.stream.Disposition.attached_pic:  # the cover of a record
            return stream
    raise Refusal("has no pictures: give it as a sound, or drop the row")
