"""Clips: the pictures that are wanted of a video, each with the moment it is shown, and the sound on the same clock."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64, UInt8

from omnijax.data.media.audio import AudioLimits, Sound, decode_track, load_audio
from omnijax.data.media.clip import Clip, decode_pictures, read_clip
from omnijax.data.media.image import ImageLimits, check_size, decode_image
from omnijax.data.media.opening import name_of, opened
from omnijax.data.refusal import Refusal
from omnijax.data.sample import MediaReference, RowId
from omnijax.errors import BadRow
from omnijax.fields import ranged

Resize = Callable[[UInt8[np.ndarray, "H W 3"], int], UInt8[np.ndarray, "h w 3"]]


@dataclass(frozen=True)
class VideoLimits(ImageLimits):
    """What is taken of a video, and what it may be; each of its pictures is held to the limits of an image.

    fps:             pictures taken a second
    min_frames:      pictures taken of a short clip, where it has as many
    max_frames:      pictures taken of a long clip, spread over all of it
    frame_rate:      pictures a second of clips given as lists of pictures
    max_held_pixels: height times width of all pictures returned, together; a clip beyond it is refused
    """

    min_pixels: int = ranged(100352, at_least=1)
    max_pixels: int = ranged(602112, at_least=1)
    max_source_pixels: int = ranged(35389440, at_least=1, at_most=178956970)  # 8192 x 4320
    fps: float = ranged(2.0, above=0.0)
    min_frames: int = ranged(4, at_least=1)
    max_frames: int = ranged(768, at_least=1)
    frame_rate: float = ranged(2.0, above=0.0)
    max_held_pixels: int = ranged(2**30, at_least=1)


@dataclass(frozen=True)
class Video:
    """A decoded clip; moments are seconds since the file's clock starts, which is where its first stream does.

    timestamps: when each picture is shown, as the file says
    duration:   from the first picture to the end of the last
    fps:        pictures returned a second, on average
    audio:      sample 0 is heard at moment 0; None: the clip has no sound, or none was asked for
    notes:      what else there is to be counted: "limited" (max_frames makes for fewer than fps), "late start" (what
                comes before the first key frame cannot be decoded), "no sound" (though asked for), "rotated" (as the
                file asks), and the notes of the sound and of single pictures
    """

    frames: UInt8[np.ndarray, "T H W 3"]
    timestamps: Float64[np.ndarray, "T"]
    duration: float
    fps: float
    audio: Sound | None
    notes: tuple[str, ...]


def load_video(
    reference: MediaReference,
    limits: VideoLimits,
    row: RowId,
    *,
    audio: AudioLimits | None = None,
    resize: Resize | None = None,
) -> Video:
    """Decode the wanted pictures of a clip, and its sound where `audio` asks for it.

    `resize` is given every picture as it is decoded, with how many there will be, so that only small ones are held.
    Raises `BadRow` where a file is damaged or beyond the limits, and where a sound that the row names is missing.
    """
    notes: list[str] = []
    if reference.frames is not None:
        count = len(reference.frames)
        if not count:
            raise BadRow(row, "video of 0 pictures: drop the row")
        clip = Clip(np.arange(count) / limits.frame_rate, count / limits.frame_rate)
    else:
        with opened(reference, "video", row) as file:
            clip = read_clip(file, lambda height, width: check_size(height, width, limits), notes)
    chosen = choose_frames(clip.times, clip.duration, limits)
    if clip.duration * limits.fps > limits.max_frames:
        notes.append("limited")
    try:
        frames = _stack(_pictures(reference, clip, chosen, limits, row, notes), chosen.size, limits, resize)
    except Refusal as refusal:
        raise BadRow(row, f"{name_of(reference, 'video')} {refusal}") from refusal
    sound = _load_sound(reference, clip, audio, row) if audio else None
    if audio and sound is None:
        notes.append("no sound")
    notes += sound.notes if sound else ()
    fps = chosen.size / clip.duration if clip.duration else limits.fps
    return Video(frames, clip.times[chosen], clip.duration, fps, sound, tuple(dict.fromkeys(notes)))


def choose_frames(
    times: Float64[np.ndarray, "frames"], duration: float, limits: VideoLimits
) -> Int64[np.ndarray, "chosen"]:
    """The pictures on show every 1 / fps seconds from the first, each once.

    Where that is more than max_frames or less than min_frames, that many moments are spread over the clip instead.
    """
    moments = math.ceil(duration * limits.fps - 1e-6)
    count = max(min(max(moments, limits.min_frames), limits.max_frames), 1)
    step = 1 / limits.fps if count == moments else duration / count
    # A millisecond of grace: some containers round to it.
    shown = np.searchsorted(times, times[0] + step * np.arange(count) + 1e-3, side="right") - 1
    chosen = np.unique(shown)
    least = min(limits.min_frames, limits.max_frames, times.size)
    if chosen.size < least:  # pictures that come in bursts
        chosen = np.unique(np.rint(np.linspace(0, times.size - 1, least)).astype(np.int64))
    return chosen


def _pictures(
    reference: MediaReference,
    clip: Clip,
    chosen: Int64[np.ndarray, "chosen"],
    limits: VideoLimits,
    row: RowId,
    notes: list[str],
) -> Iterator[UInt8[np.ndarray, "H W 3"]]:
    if reference.frames is None:
        with opened(reference, "video", row) as file:
            yield from decode_pictures(file, clip, chosen, notes)
        return
    for index in chosen:
        with opened(reference.frames[index], "image", row) as file:
            picture = decode_image(file, limits)
        notes += picture.notes
        yield picture.pixels


def _stack(
    pictures: Iterator[UInt8[np.ndarray, "H W 3"]], count: int, limits: VideoLimits, resize: Resize | None
) -> UInt8[np.ndarray, "T H W 3"]:
    held = None
    for number, picture in enumerate(pictures):
        picture = resize(picture, count) if resize else picture
        if held is None:
            pixels = count * picture.shape[0] * picture.shape[1]
            if pixels > limits.max_held_pixels:
                raise Refusal(
                    f"has {pixels} wanted pixels, more than max_held_pixels {limits.max_held_pixels}: drop it"
                )
            held = np.empty((count, *picture.shape), np.uint8)
        if picture.shape != held.shape[1:]:
            raise Refusal(f"changes its size from {held.shape[1:3]} to {picture.shape[:2]}: convert it or drop the row")
        held[number] = picture
    assert held is not None, "a clip has at least one picture, or is refused"
    return held


def _load_sound(reference: MediaReference, clip: Clip, limits: AudioLimits, row: RowId) -> Sound | None:
    """The sound that belongs to a clip: another file, or the track beside its pictures."""
    other = reference.audio
    if other is not None and (other.path, other.data) != (reference.path, reference.data):
        return load_audio(other, limits, row)
    if other is None and not clip.has_sound:
        return None
    with opened(reference, "video", row) as file:
        return decode_track(file, limits, start=clip.start)
