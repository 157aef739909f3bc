"""Decoded media against what was drawn or played into them, and against soundfile; damage is one named bad row."""

import concurrent.futures
import http.server
import io
import itertools
import multiprocessing
import struct
import subprocess
import sys
import threading
import warnings
import zlib
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import soxr
from PIL import Image

from omnijax.data.media import clip as clip_module
from omnijax.data.media.audio import AudioLimits, load_audio
from omnijax.data.media.image import ImageLimits, load_image
from omnijax.data.media.video import VideoLimits, choose_frames, load_video
from omnijax.data.sample import MediaReference, RowId
from omnijax.errors import BadRow, UserError

ROW = RowId("source", "a.jsonl", 7)
IMAGE, VIDEO, AUDIO = ImageLimits(), VideoLimits(), AudioLimits()
RED = np.array([200, 30, 60], np.uint8)


def held(data: bytes) -> MediaReference:
    return MediaReference(data=data)


def refusal(load, *arguments, **keywords) -> str:
    """What the one `BadRow` of a call says after the row's id; it survives a journey between processes."""
    with pytest.raises(BadRow) as caught:
        load(*arguments, ROW, **keywords)
    message = str(caught.value)
    assert message.startswith(f"{ROW}: ")
    assert "\n" not in message
    return message.removeprefix(f"{ROW}: ")


@pytest.fixture(autouse=True)
def silent(capfd):
    """No decoder writes to stderr, whatever it is given."""
    yield
    assert capfd.readouterr().err == ""


# Pictures


def encoded(image: Image.Image, file_format: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def noise(height: int = 5, width: int = 7, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


STORED = {  # how a picture stands in a file that asks for orientation 1..8 (Exif 2.32, tag 0x0112)
    1: lambda x: x,
    2: np.fliplr,
    3: lambda x: np.rot90(x, 2),
    4: np.flipud,
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: np.rot90(x),
    7: lambda x: np.rot90(x.swapaxes(0, 1), 2),
    8: lambda x: np.rot90(x, -1),
}


@pytest.mark.parametrize("orientation", STORED)
def test_a_picture_stands_upright(orientation):
    picture = noise()
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(STORED[orientation](picture).copy()), exif=exif)
    found = load_image(held(data), IMAGE, ROW)
    np.testing.assert_array_equal(found.pixels, picture, strict=True)
    assert found.notes == (("rotated",) if orientation > 1 else ())


def test_a_jpeg_stands_upright_too():
    picture = np.zeros((32, 48, 3), np.uint8)
    picture[:16, :16, 0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    found = load_image(held(encoded(Image.fromarray(np.rot90(picture).copy()), "JPEG", exif=exif)), IMAGE, ROW).pixels
    assert found.shape == (32, 48, 3)
    assert found[:12, :12, 0].min() > 200
    assert found[20:, 20:].max() < 50


def grey(image: Image.Image) -> np.ndarray:
    return np.repeat(np.asarray(image.convert("L"))[:, :, None], 3, axis=2)


def test_every_pixel_mode_becomes_rgb():
    picture = noise()
    image = Image.fromarray(picture)
    bits = Image.fromarray(picture[:, :, 0] > 127)
    palette = image.quantize(5)
    # Cyan, magenta, yellow without black are the complements.
    cmyk = Image.fromarray(np.concatenate([255 - picture, np.zeros((5, 7, 1), np.uint8)], 2), "CMYK")
    exact = {
        "1": (encoded(bits), grey(bits)),
        "L": (encoded(image.convert("L")), grey(image)),
        "P": (encoded(palette), np.array(palette.getpalette()).reshape(-1, 3)[np.asarray(palette)].astype(np.uint8)),
        "RGB": (encoded(image, "BMP"), picture),
        "RGB WebP": (encoded(image, "WEBP", lossless=True), picture),
        "CMYK": (encoded(cmyk, "TIFF"), picture),
    }
    for name, (data, expected) in exact.items():
        found = load_image(held(data), IMAGE, ROW)
        np.testing.assert_array_equal(found.pixels, expected, strict=True, err_msg=name)
        assert found.notes == ()
    for stored, rounding in ((image.convert("YCbCr"), 3), (lab(image), 20)):  # eight bits of LAB are coarse
        found = load_image(held(encoded(stored, "TIFF")), IMAGE, ROW).pixels
        np.testing.assert_allclose(found.astype(int), picture, atol=rounding, err_msg=stored.mode)


def lab(image: Image.Image) -> Image.Image:
    from PIL import ImageCms

    profiles = [ImageCms.createProfile(name) for name in ("sRGB", "LAB")]
    return ImageCms.profileToProfile(image, *profiles, outputMode="LAB")


def test_sixteen_bits_are_scaled_and_not_cut():
    values = np.array([[0, 128, 129, 257, 32768, 65535]], np.uint16)
    found = load_image(held(encoded(Image.fromarray(values))), IMAGE, ROW)
    expected = [0, 0, 1, 1, 128, 255]  # value / 257, rounded
    np.testing.assert_array_equal(found.pixels, np.repeat(np.array([expected], np.uint8)[:, :, None], 3, axis=2))
    assert found.notes == ("16 bits",)
    graymap = b"P5 6 1 65535\n" + values.astype(">u2").tobytes()
    np.testing.assert_array_equal(load_image(held(graymap), IMAGE, ROW).pixels, found.pixels)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_a_white_are_refused(mode):
    data = encoded(Image.fromarray(noise()[:, :, 0]).convert(mode), "TIFF")
    assert f"has 32-bit pixels (mode {mode})" in refusal(load_image, held(data), IMAGE)


def test_what_is_transparent_is_seen_on_white():
    colours = np.array([[[0, 0, 0, 0], [200, 100, 0, 255], [100, 50, 0, 51]]], np.uint8)
    expected = np.array([[[255, 255, 255], [200, 100, 0], [224, 214, 204]]], np.uint8)  # 51 / 255 = 1 / 5
    found = load_image(held(encoded(Image.fromarray(colours))), IMAGE, ROW)
    np.testing.assert_array_equal(found.pixels, expected, strict=True)
    assert found.notes == ("on white",)
    grey_alpha = encoded(Image.fromarray(np.array([[[0, 0], [50, 255]]], np.uint8), "LA"))
    np.testing.assert_array_equal(load_image(held(grey_alpha), IMAGE, ROW).pixels[:, :, 0], [[255, 50]])
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    found = load_image(held(encoded(palette, transparency=0)), IMAGE, ROW)
    np.testing.assert_array_equal(found.pixels, [[[255, 255, 255], [40, 50, 60]]])


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_picture_is_taken_and_noted(file_format):
    images = [Image.new("RGB", (6, 4), (value, 0, 0)) for value in (250, 100, 0)]
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = encoded(images[0], file_format, save_all=True, append_images=images[1:], **options)
    found = load_image(held(data), IMAGE, ROW)
    np.testing.assert_array_equal(found.pixels, np.asarray(images[0]), strict=True)
    assert found.notes == ("first of several",)


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (1, 1, ""),
        (1, 200, ""),
        (200, 1, ""),
        (3, 900, "has 3 x 900 pixels, beyond max_ratio 200"),
        (900, 3, "has 900 x 3 pixels, beyond max_ratio 200"),
        (28, 6000, "has 28 x 6000 pixels, beyond max_ratio 200"),
        (9000, 12000, "has 9000 x 12000 pixels, more than max_source_pixels 89478485"),
        (15000, 12000, "could be decompression bomb"),
    ],
)
def test_sizes(height, width, expected):
    data = header_only(height, width) if height > 1000 and width > 1000 else encoded(Image.new("L", (width, height)))
    if expected:
        assert expected in refusal(load_image, held(data), IMAGE)
    else:
        assert load_image(held(data), IMAGE, ROW).pixels.shape == (height, width, 3)


def header_only(height: int, width: int) -> bytes:
    """A PNG that claims to be large: its header with a new size and a new checksum."""
    data = bytearray(encoded(Image.new("L", (1, 1))))
    data[16:24] = struct.pack(">2I", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def test_a_large_picture_warns_of_nothing():
    limits = ImageLimits(max_source_pixels=9500**2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert "cannot be decoded" in refusal(load_image, held(header_only(9500, 9500)), limits)
    assert not caught


PHOTO = encoded(Image.fromarray(noise(64, 64)), "JPEG")


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("half.jpg", PHOTO[: len(PHOTO) // 2], "cannot be decoded (image file is truncated"),
        ("half.png", encoded(Image.fromarray(noise(64, 64)))[:5000], "cannot be decoded ("),
        ("html.jpg", b"<!DOCTYPE html><html>not found</html>", "it begins with b'<!DOCTYPE html><"),
        ("zeros.jpg", bytes(500), "is none of JPEG"),
        ("empty.png", b"", "is an empty file"),
        ("drawing.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EOF\n", "is none of JPEG"),
    ],
)
def test_a_damaged_picture_is_a_bad_row(tmp_path, name, data, expected):
    (tmp_path / name).write_bytes(data)
    message = refusal(load_image, MediaReference(path=str(tmp_path / name)), IMAGE)
    assert message.startswith("image '")
    assert name in message
    assert expected in message


def test_the_bytes_decide_and_not_the_name(tmp_path):
    path = tmp_path / "ünï ✓ 图.jpg"
    path.write_bytes(encoded(Image.fromarray(noise())))
    np.testing.assert_array_equal(load_image(MediaReference(path=str(path)), IMAGE, ROW).pixels, noise())


@pytest.mark.parametrize("load", [load_image, load_video, load_audio])
def test_what_is_no_file_is_a_bad_row(load, tmp_path):
    limits = {load_image: IMAGE, load_video: VIDEO, load_audio: AUDIO}[load]
    assert "cannot be opened (No such file or directory)" in refusal(
        load, MediaReference(path=str(tmp_path / "none")), limits
    )
    assert "is a folder or a device" in refusal(load, MediaReference(path=str(tmp_path)), limits)
    assert "is a folder or a device" in refusal(load, MediaReference(path="/dev/zero"), limits)
    assert "has no bytes" in refusal(load, held(b""), limits)
    assert "is neither a path nor bytes" in refusal(load, MediaReference(), limits)
    assert "of 5 bytes" in refusal(load, held(b"hello"), limits)


# Clips

BITS = 11


def drawn(number: int, height: int = 16, width: int = 64) -> np.ndarray:
    """A picture that shows its number in black and white bars, which no compression blurs away."""
    picture = np.zeros((height, width, 3), np.uint8)
    for bit in range(BITS):
        picture[:, bit * 5 : bit * 5 + 5] = 255 * (number >> bit & 1)
    return picture


def read_number(picture: np.ndarray) -> int:
    middle = picture.shape[0] // 2
    return sum(int(picture[middle, bit * 5 + 2].mean() > 127) << bit for bit in range(BITS))


def make_clip(
    count: int,
    *,
    file_format: str = "mp4",
    codec: str = "libx264",
    times: list[float] | None = None,
    sound: np.ndarray | None = None,
    sound_start: float = 0.0,
    rate: int = 30,
    draw=drawn,
    **options: str,
) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=file_format) as streams:
        stream = streams.add_stream(codec, rate=rate, options={"g": "30", **options})
        stream.height, stream.width = draw(0).shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000) if times else Fraction(1, rate)
        track = streams.add_stream("aac", rate=16000, layout="mono") if sound is not None else None
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(draw(number), format="rgb24")
            frame.pts = round(times[number] * 1000) if times else number
            frame.time_base = stream.codec_context.time_base
            streams.mux(stream.encode(frame))
        streams.mux(stream.encode(None))
        if track is not None:
            for first in range(0, sound.size, 1024):
                frame = av.AudioFrame.from_ndarray(sound[None, first : first + 1024], format="fltp", layout="mono")
                frame.sample_rate, frame.time_base = 16000, Fraction(1, 16000)
                frame.pts = first + round(sound_start * 16000)
                streams.mux(track.encode(frame))
            streams.mux(track.encode(None))
    return file.getvalue()


@pytest.fixture(scope="module")
def minute() -> bytes:
    """60 s at 30 pictures a second, a key frame every second, each picture numbered."""
    return make_clip(1800, preset="ultrafast")


def test_a_picture_its_number_and_its_moment_agree(minute):
    found = load_video(held(minute), VIDEO, ROW)
    assert [read_number(picture) for picture in found.frames] == list(range(0, 1800, 15))
    np.testing.assert_allclose(found.timestamps, np.arange(120) / 2, atol=1e-9)
    assert (found.duration, found.fps) == (pytest.approx(60), pytest.approx(2))
    assert found.notes == ()


def test_a_limited_clip_is_spread_over_all_of_it_with_true_moments(minute, monkeypatch):
    decoded = []
    decode = clip_module._decode
    monkeypatch.setattr(clip_module, "_decode", lambda *a: (decoded.append(frame) or frame for frame in decode(*a)))
    found = load_video(held(minute), VideoLimits(fps=2.0, max_frames=16), ROW)
    numbers = [read_number(picture) for picture in found.frames]
    assert numbers == [int(1800 / 16 * k) for k in range(16)]
    np.testing.assert_allclose(found.timestamps, np.array(numbers) / 30, atol=1e-9)
    assert found.fps == pytest.approx(16 / 60)
    assert found.notes == ("limited",)
    assert len(decoded) <= 16 * 30  # of 1800: a stretch of a second for each


ALWAYS_B = "bframes=3:b-adapt=0:scenecut=0"
REORDERING = {"bf": "3", "b_strategy": "0", "sc_threshold": "0"}
CONTAINERS = {
    "mp4": {},
    "mp4 that reorders": REORDERING,
    "mp4 with open groups": {"x264-params": f"open-gop=1:keyint=12:{ALWAYS_B}"},
    "mp4 hevc": {"codec": "libx265", "x265-params": f"open-gop=1:keyint=12:{ALWAYS_B}:log-level=none"},
    "matroska": {"file_format": "matroska", **REORDERING},
    "mpegts": {"file_format": "mpegts", **REORDERING},
    "webm vp8 with hidden pictures": {
        "file_format": "webm",
        "codec": "libvpx",
        "auto-alt-ref": "1",
        "lag-in-frames": "16",
        "cpu-used": "8",
    },
    "webm vp9": {"file_format": "webm", "codec": "libvpx-vp9", "cpu-used": "8", "lag-in-frames": "16"},
    "avi": {"file_format": "avi", "codec": "mpeg4"},
    "avi that reorders": {"file_format": "avi", **REORDERING},
    "avi mpeg4 that reorders": {"file_format": "avi", "codec": "mpeg4", **REORDERING},
    "raw": {"file_format": "h264", "rate": 25, **REORDERING},
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_gives_the_pictures_of_their_moments(name):
    rate = CONTAINERS[name].get("rate", 30)
    data = make_clip(100, **CONTAINERS[name])
    for limits in (VideoLimits(fps=7.3), VideoLimits(fps=30.0, max_frames=5), VideoLimits(fps=60.0)):
        found = load_video(held(data), limits, ROW)
        numbers = [read_number(picture) for picture in found.frames]
        shift = found.timestamps[0]  # of AVI, by a picture
        assert shift <= 1.01 / rate
        np.testing.assert_allclose(found.timestamps - shift, np.array(numbers) / rate, atol=2e-3)
        assert found.duration == pytest.approx(100 / rate, abs=2e-3)
        assert numbers == sorted(set(numbers))
        assert len(numbers) == {7.3: -(-100 * 7.3 // rate), 30.0: 5, 60.0: 100}[limits.fps]


@pytest.mark.parametrize("name", ["mp4", "mp4 with open groups", "mp4 hevc", "mpegts", "webm vp8 with hidden pictures"])
def test_each_picture_can_be_had_alone(name):
    """Also one that is shown before the key frame it is stored after, which needs the stretch before."""
    file = io.BytesIO(make_clip(40, **CONTAINERS[name]))
    whole = clip_module.read_clip(file, lambda height, width: None, [])
    assert whole.stamps is not None
    for index in range(40):
        (picture,) = clip_module.decode_pictures(file, whole, np.array([index]), [])
        assert read_number(picture) == index


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (6, [0, 1, 3, 4]), (31, [0, 7, 15, 23])]
)
def test_short_clips_give_what_they_have(count, expected):
    """min_frames is 4; 31 pictures are a little over a second, so 4 moments lie 31 / 4 pictures apart."""
    found = load_video(held(make_clip(count)), VIDEO, ROW)
    assert [read_number(picture) for picture in found.frames] == expected
    np.testing.assert_allclose(found.timestamps, np.array(expected) / 30, atol=1e-9)
    assert found.fps == pytest.approx(len(expected) / (count / 30))


def test_a_variable_rate_keeps_its_true_moments():
    times = [0, 0.1, 0.2, 5.0, 5.5, 9.0]
    found = load_video(held(make_clip(6, times=times)), VideoLimits(fps=1.0), ROW)
    # On show at 0, 1, .. 9 s: pictures 0, 2, 2, 2, 2, 3, 4, 4, 4, 5; each comes once.
    assert [read_number(picture) for picture in found.frames] == [0, 2, 3, 4, 5]
    np.testing.assert_allclose(found.timestamps, [0, 0.2, 5.0, 5.5, 9.0], atol=1e-3)


@pytest.mark.parametrize(
    ("times", "limits", "expected"),
    [
        (np.arange(1800) / 30, VideoLimits(), np.arange(0, 1800, 15)),
        (np.arange(90) / 29.97, VideoLimits(fps=1.0, min_frames=1), [0, 29, 59, 89]),
        (np.arange(10) / 30, VideoLimits(fps=60.0), np.arange(10)),
        (np.arange(1000) / 30, VideoLimits(max_frames=3), [0, 333, 666]),
        (np.arange(3) * 10.0, VideoLimits(fps=1.0, max_frames=1), [0]),
        (np.array([0.0]), VideoLimits(), [0]),
        (np.array([0, 0.01, 0.02, 0.03, 50.0]), VideoLimits(fps=0.01), [0, 1, 3, 4]),  # a burst, then a still
    ],
)
def test_which_pictures_are_chosen(times, limits, expected):
    duration = times[-1] - times[0] + (np.median(np.diff(times)) if len(times) > 1 else 0)
    np.testing.assert_array_equal(choose_frames(times, duration, limits), expected)


def test_a_recording_that_starts_between_key_frames_is_taken_from_the_first_one():
    data = make_clip(100, file_format="mpegts", **REORDERING)
    late = data[data.index(b"\x47\x40", len(data) // 4) :]  # from a packet on, well after the first key frame
    found = load_video(held(late), VideoLimits(fps=30.0), ROW)
    numbers = [read_number(picture) for picture in found.frames]
    assert numbers == list(range(30, 100))
    np.testing.assert_allclose(np.diff(found.timestamps), 1 / 30, atol=1e-4)
    assert found.notes == ("late start",)


def test_headers_that_lie_change_nothing():
    data = make_clip(31, file_format="avi", codec="mpeg4")
    true = load_video(held(data), VIDEO, ROW)
    total = data.index(b"avih") + 8 + 16  # dwTotalFrames
    length = data.index(b"strh") + 8 + 32  # dwLength
    for at, value in itertools.product((total, length), (0, 7, 10**6)):
        found = load_video(held(data[:at] + struct.pack("<I", value) + data[at + 4 :]), VIDEO, ROW)
        np.testing.assert_array_equal(found.frames, true.frames)
        np.testing.assert_array_equal(found.timestamps, true.timestamps)
    at = data.index(b"strh") + 8 + 24  # dwRate, pictures a second
    found = load_video(held(data[:at] + struct.pack("<I", 0) + data[at + 4 :]), VIDEO, ROW)
    np.testing.assert_array_equal(found.frames, true.frames)
    np.testing.assert_allclose(found.timestamps, true.timestamps, atol=1e-4)


def test_a_phone_s_clip_stands_upright():
    data = make_clip(3, draw=lambda number: corner(16, 32))
    matrix = data.index(b"tkhd") + 4 + 40  # of a version 0 track header
    turned = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)  # x' = -y, y' = x: clockwise
    found = load_video(held(data[:matrix] + turned + data[matrix + 36 :]), VIDEO, ROW)
    assert found.frames.shape == (3, 32, 16, 3)
    assert found.notes == ("rotated",)
    assert found.frames[0, :6, 10:, 0].min() > 200  # the left upper corner is now the right upper one
    assert found.frames[0, 10:].max() < 50


def corner(height: int, width: int) -> np.ndarray:
    picture = np.zeros((height, width, 3), np.uint8)
    picture[:8, :8] = 255
    return picture


def click(seconds: float, moment: float) -> np.ndarray:
    sound = np.zeros(round(seconds * 16000), np.float32)
    sound[round(moment * 16000)] = 1.0
    return sound


@pytest.mark.parametrize(("file_format", "start"), [("mp4", 0.0), ("mp4", 0.25), ("matroska", 0.25), ("mpegts", 0.25)])
@pytest.mark.parametrize("seconds", [0.5, 3.0], ids=["shorter", "longer"])
def test_sound_and_pictures_share_a_clock(file_format, start, seconds):
    data = make_clip(60, file_format=file_format, sound=click(seconds, 0.4), sound_start=start)
    found = load_video(held(data), VIDEO, ROW, audio=AUDIO)
    assert found.notes == ()
    heard = found.audio.samples
    assert np.argmax(np.abs(heard)) / 16000 == pytest.approx(start + 0.4, abs=2e-3)
    assert heard.size / 16000 == pytest.approx(start + seconds, abs=0.13)  # AAC fills up its last packet
    assert load_video(held(data), VIDEO, ROW).audio is None
    np.testing.assert_allclose(load_audio(held(data), AUDIO, ROW).samples[-4000:], heard[-4000:], atol=1e-6)


def test_a_clip_without_sound_and_a_sound_without_pictures():
    found = load_video(held(make_clip(9)), VIDEO, ROW, audio=AUDIO)
    assert found.audio is None
    assert found.notes == ("no sound",)
    assert "has no sound track" in refusal(load_audio, held(make_clip(9)), AUDIO)
    both = MediaReference(data=make_clip(9), audio=MediaReference(data=make_clip(9)))
    assert "has no sound track" in refusal(load_video, both, VIDEO, audio=AUDIO)
    assert "has no pictures" in refusal(load_video, held(wav(click(0.5, 0.1))), VIDEO)
    only = io.BytesIO()
    with av.open(only, "w", format="mp4") as streams:
        track = streams.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(click(1, 0.5)[None], format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 16000, 0
        streams.mux(track.encode(frame))
        streams.mux(track.encode(None))
    assert "has no pictures" in refusal(load_video, held(only.getvalue()), VIDEO)
    assert load_audio(held(only.getvalue()), AUDIO, ROW).samples.size == pytest.approx(16000, abs=2048)


def test_another_sound_replaces_a_clip_s_own():
    reference = MediaReference(data=make_clip(9, sound=click(1, 0.5)), audio=held(wav(click(2, 0.75))))
    found = load_video(reference, VIDEO, ROW, audio=AUDIO)
    np.testing.assert_allclose(found.audio.samples, click(2, 0.75), atol=1e-4)


def test_a_list_of_pictures_is_a_clip():
    frames = tuple(held(encoded(Image.fromarray(drawn(number)))) for number in range(10))
    reference = MediaReference(frames=frames, audio=held(wav(click(2, 0.75))))
    found = load_video(reference, VideoLimits(fps=1.0, frame_rate=4.0, min_frames=1), ROW, audio=AUDIO)
    assert [read_number(picture) for picture in found.frames] == [0, 4, 8]
    np.testing.assert_array_equal(found.timestamps, [0, 1, 2])
    assert (found.duration, found.fps) == (2.5, 3 / 2.5)
    assert np.argmax(found.audio.samples) == 12000
    odd = MediaReference(frames=(frames[0], held(encoded(Image.fromarray(drawn(1, 20))))))
    assert "video of 2 pictures changes its size from (16, 64) to (20, 64)" in refusal(load_video, odd, VIDEO)
    assert "video of 0 pictures" in refusal(load_video, MediaReference(frames=()), VIDEO)
    broken = MediaReference(frames=(frames[0], held(b"<html>")))
    assert refusal(load_video, broken, VIDEO).startswith("image of 6 bytes is none of JPEG")


def test_resizing_comes_before_holding(minute):
    asked = []

    def resize(picture, count):
        asked.append(count)
        return picture[::4, ::4]

    limits = VideoLimits(max_frames=6, max_held_pixels=6 * 4 * 16)
    assert load_video(held(minute), limits, ROW, resize=resize).frames.shape == (6, 4, 16, 3)
    assert asked == [6] * 6
    assert "has 6144 wanted pixels, more than max_held_pixels 384" in refusal(load_video, held(minute), limits)
    assert "more than max_source_pixels 1000" in refusal(load_video, held(minute), VideoLimits(max_source_pixels=1000))
    assert "beyond max_ratio 2.0" in refusal(load_video, held(minute), VideoLimits(max_ratio=2.0))


def with_index_first(data: bytes, path: Path) -> bytes:
    """The same mp4 with its index before its pictures, as files for the web have it."""
    with (
        av.open(io.BytesIO(data)) as source,
        av.open(str(path), "w", container_options={"movflags": "faststart"}) as made,
    ):
        stream = made.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                made.mux(packet)
    return path.read_bytes()


def test_a_damaged_clip_is_a_bad_row(tmp_path):
    plain = make_clip(300, preset="ultrafast")
    early = with_index_first(plain, tmp_path / "early.mp4")
    matroska = make_clip(300, preset="ultrafast", file_format="matroska")
    middle = len(early) // 2
    cases = {
        "half.mp4": (plain[: len(plain) // 2], "cannot be decoded (Invalid data"),
        "early.mp4": (early[: len(early) // 2], "ends in the middle of a packet"),
        "garbled.mp4": (early[:middle] + b"\x55" * 999 + early[middle + 999 :], "cannot be decoded (Invalid data"),
        "half.mkv": (matroska[: len(matroska) // 2], "its header states"),
        "zero.mp4": (bytes(1000), "cannot be decoded (Invalid data"),
        "page.mp4": (b"<!DOCTYPE html><html>not found</html>", "cannot be decoded (Invalid data"),
    }
    for name, (data, expected) in cases.items():
        (tmp_path / name).write_bytes(data)
        message = refusal(load_video, MediaReference(path=str(tmp_path / name)), VIDEO)
        assert message.startswith("video '"), name
        assert expected in message, name


def test_nothing_that_a_file_refers_to_is_opened(tmp_path):
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_):
            pass

    (tmp_path / "clip.ts").write_bytes(make_clip(9, file_format="mpegts"))
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/clip.ts"
        playlist = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n"
        session = "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n"
        for name, text in {
            "far.m3u8": playlist.format(url),
            "near.m3u8": playlist.format(tmp_path / "clip.ts"),
            "file.m3u8": playlist.format(f"file://{tmp_path}/clip.ts"),
            "list.ffconcat": "ffconcat version 1.0\nfile clip.ts\n",
            "list.mp4": f"ffconcat version 1.0\nfile '{url}'\n",
            "session.sdp": session,
        }.items():
            (tmp_path / name).write_text(text)
            for load, limits in ((load_video, VIDEO), (load_audio, AUDIO)):
                assert "cannot be decoded" in refusal(load, MediaReference(path=str(tmp_path / name)), limits), name
        server.shutdown()
    assert not asked


# Sound


def wav(samples: np.ndarray, rate: int = 16000, file_format: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=file_format, subtype=subtype)
    return file.getvalue()


def reference_sound(data: bytes, rate: int) -> np.ndarray:
    samples, source_rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    return soxr.resample(samples.mean(axis=1), source_rate, rate, quality="HQ")


@pytest.mark.parametrize(
    ("file_format", "subtype", "rate", "channels"),
    [
        ("WAV", "PCM_U8", 8000, 1),
        ("WAV", "PCM_16", 16000, 1),
        ("WAV", "PCM_16", 44100, 2),
        ("WAV", "PCM_24", 48000, 2),
        ("WAV", "PCM_32", 96000, 1),
        ("WAV", "FLOAT", 22050, 3),
        ("WAV", "DOUBLE", 11025, 2),
        ("WAV", "ULAW", 8000, 1),
        ("WAVEX", "PCM_16", 44100, 6),
        ("RF64", "PCM_16", 44100, 2),
        ("FLAC", "PCM_16", 44100, 2),
        ("FLAC", "PCM_24", 48000, 8),
        ("AIFF", "PCM_16", 32000, 2),
        ("OGG", "VORBIS", 44100, 2),
        ("OGG", "OPUS", 48000, 2),
        ("MP3", "MPEG_LAYER_III", 44100, 2),
    ],
)
def test_sound_is_mixed_down_then_resampled(file_format, subtype, rate, channels):
    samples = 0.1 * np.random.default_rng(0).standard_normal((rate * 3 // 2 + 17, channels))
    data = wav(samples, rate, file_format, subtype)
    for target in (16000, 24000):
        found = load_audio(held(data), AudioLimits(sample_rate=target), ROW)
        rounding = 2e-4 if subtype == "OPUS" else 5e-6  # two decoders
        np.testing.assert_allclose(found.samples, reference_sound(data, target), atol=rounding, strict=True)
        assert (found.sample_rate, found.notes) == (target, ())


def test_silent_empty_and_tiny_sounds():
    assert not load_audio(held(wav(np.zeros(1000))), AUDIO, ROW).samples.any()
    assert load_audio(held(wav(np.full(1, 0.5))), AUDIO, ROW).samples.tolist() == [0.5]
    assert load_audio(held(wav(np.ones(2), 8000)), AUDIO, ROW).samples.size == 4
    assert "has not one sample at 16000 Hz" in refusal(load_audio, held(wav(np.ones(1), 48000)), AUDIO)
    assert "has not one sample at 16000 Hz" in refusal(load_audio, held(wav(np.zeros(0))), AUDIO)


def test_a_long_sound_is_all_there_refused_or_cut_and_noted():
    six_minutes = wav(np.tile(np.arange(-800, 800) / 1600, 1800), 8000)
    found = load_audio(held(six_minutes), AUDIO, ROW)
    assert (found.samples.size, found.notes) == (360 * 16000, ())
    assert "is longer than max_seconds 300.0" in refusal(load_audio, held(six_minutes), AudioLimits(max_seconds=300.0))
    cut = load_audio(held(six_minutes), AudioLimits(max_seconds=300.0, longer="cut"), ROW)
    assert (cut.samples.size, cut.notes) == (300 * 16000, ("cut",))
    np.testing.assert_array_equal(cut.samples[:1000000], found.samples[:1000000])
    whole = load_audio(held(six_minutes), AudioLimits(max_seconds=360.0), ROW)
    assert whole.notes == ()


def test_a_cut_off_sound_is_a_bad_row_and_a_piped_one_is_not():
    samples = 0.1 * np.random.default_rng(0).standard_normal(40000)
    data = wav(samples)
    assert "ends in the middle of a packet" in refusal(load_audio, held(data[:50000]), AUDIO)
    for size in (0, 0x7FFFF024, 0xFFFFFFFF):  # what programs write that cannot come back to the header
        at = data.index(b"data") + 4
        piped = data[:4] + struct.pack("<I", size) + data[8:at] + struct.pack("<I", size) + data[at + 4 :]
        np.testing.assert_array_equal(
            load_audio(held(piped), AUDIO, ROW).samples, load_audio(held(data), AUDIO, ROW).samples
        )
    for file_format in ("FLAC", "AIFF", "AU"):
        data = wav(samples, file_format=file_format)
        assert refusal(load_audio, held(data[: len(data) // 2]), AUDIO)
    for data in (bytes(1000), b"<html>" * 100, wav(samples)[:30], PHOTO):
        assert refusal(load_audio, held(data), AUDIO)


def test_samples_that_are_no_numbers_are_refused():
    for bad in (np.nan, np.inf):
        data = wav(np.array([0.0, bad, 0.0], np.float32), subtype="FLOAT")
        assert "samples that are not numbers" in refusal(load_audio, held(data), AUDIO)


def test_a_gap_in_the_timestamps_is_silence_and_noted():
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as streams:
        track = streams.add_stream("pcm_s16le", rate=16000, layout="mono")
        for first in (0, 1024, 16000):
            frame = av.AudioFrame.from_ndarray(np.full((1, 1024), 9999, np.int16), format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 16000, first, Fraction(1, 16000)
            streams.mux(track.encode(frame))
        streams.mux(track.encode(None))
    found = load_audio(held(file.getvalue()), AUDIO, ROW)
    assert found.notes == ("gaps",)
    assert found.samples.size == 17024
    assert (found.samples[2048:16000] == 0).all()
    assert (found.samples[:2048] != 0).all()
    assert (found.samples[16000:] != 0).all()


# Where they run


def in_worker(path: str) -> tuple:
    reference = MediaReference(path=path)
    video = load_video(reference, VIDEO, ROW, audio=AUDIO)
    try:
        load_image(reference, IMAGE, ROW)
    except BadRow as error:
        return video.frames.shape, video.audio.samples.size, "jax" in sys.modules, error
    return ()


def test_it_works_in_spawned_workers_and_bad_rows_come_back(tmp_path):
    (tmp_path / "clip.mp4").write_bytes(make_clip(9, sound=click(1, 0.5)))
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        shape, size, jax, error = pool.submit(in_worker, str(tmp_path / "clip.mp4")).result()
    assert shape == (4, 16, 64, 3)
    assert size >= 16000
    assert isinstance(error, UserError)
    assert (error.row, str(error).startswith(f"{ROW}: image ")) == (ROW, True)
    assert not jax


def test_importing_leaves_jax_alone():
    check = "import sys, omnijax.data.media.video, omnijax.data.formats; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
