"""Pictures: any size and pixel mode to RGB bytes, upright."""

import re
import warnings
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import PIL
from jaxtyping import UInt8
from PIL import Image, ImageOps

from omnijax.data.media.opening import opened
from omnijax.data.refusal import Refusal
from omnijax.data.sample import MediaReference, RowId
from omnijax.errors import UserError
from omnijax.fields import ranged

# Each reads pixels only; others that Pillow knows start programs (EPS) or are too loosely marked (TGA).
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO")
_PILLOW = re.compile("PIL")


@dataclass(frozen=True)
class ImageLimits:
    """What pictures may be.

    min_pixels, max_pixels: height times width that a model's processor resizes a picture into; decoding does not
    max_ratio:              longer by shorter side; a picture beyond it is refused
    max_source_pixels:      height times width of a file; one beyond it is refused before it is decoded
    """

    min_pixels: int = ranged(3136, at_least=1)
    max_pixels: int = ranged(1003520, at_least=1)
    max_ratio: float = ranged(200.0, at_least=1.0)
    max_source_pixels: int = ranged(89478485, at_least=1, at_most=178956970)  # Pillow's own warning and refusal

    def __post_init__(self) -> None:
        if self.min_pixels > self.max_pixels:
            raise UserError(
                f"{type(self).__name__}.min_pixels = {self.min_pixels} is above max_pixels = {self.max_pixels}: "
                f"raise the one or lower the other"
            )


@dataclass(frozen=True)
class Picture:
    """A decoded picture.

    notes: what was done beside decoding, to be counted: "rotated" (as its EXIF asks), "first of several" (of an
        animation's pictures or a file's pages), "on white" (it was transparent), "16 bits" (scaled to 8)
    """

    pixels: UInt8[np.ndarray, "H W 3"]
    notes: tuple[str, ...]


def load_image(reference: MediaReference, limits: ImageLimits, row: RowId) -> Picture:
    """Decode a picture; raises `BadRow` where it is damaged or beyond the limits."""
    with opened(reference, "image", row) as file:
        return decode_image(file, limits)


def decode_image(file: BinaryIO, limits: ImageLimits) -> Picture:
    """Decode a picture from an open file; raises `Refusal` beyond the limits and whatever Pillow does on damage."""
    _silence_pillow()
    try:
        image: Image.Image = Image.open(file, formats=_FORMATS)
    except PIL.UnidentifiedImageError as error:
        file.seek(0)
        known = ", ".join(_FORMATS)
        raise Refusal(f"is none of {known}: it begins with {file.read(16)!r}; mend it or drop the row") from error
    with image:
        check_size(image.height, image.width, limits)
        notes = []
        if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # the others of a phone's MPO are not shown
            notes.append("first of several")
        image.load()
        upright = ImageOps.exif_transpose(image)
        if image.getexif().get(0x0112, 1) in range(2, 9):
            notes.append("rotated")
        rgb, note = _to_rgb(upright, image.format)
        return Picture(np.asarray(rgb), (*notes, *note))


def check_size(height: int, width: int, limits: ImageLimits) -> None:
    """Raises `Refusal` where a picture of this size is beyond the limits."""
    size = f"has {height} x {width} pixels"
    if height * width > limits.max_source_pixels:
        raise Refusal(f"{size}, more than max_source_pixels {limits.max_source_pixels}: shrink it or drop the row")
    if max(height, width) > limits.max_ratio * min(height, width):
        raise Refusal(f"{size}, beyond max_ratio {limits.max_ratio}: crop it or drop the row")


def _to_rgb(image: Image.Image, file_format: str | None) -> tuple[Image.Image, tuple[str, ...]]:
    if image.mode.startswith("I;16") or (image.mode == "I" and file_format == "PPM"):
        # Pillow's own conversion cuts at 255 instead of scaling.
        grey = (np.asarray(image).astype(np.uint32) + 128) // 257
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB"), ("16 bits",)
    if image.mode in ("I", "F"):
        raise Refusal(f"has 32-bit pixels (mode {image.mode}), which state no white: save it with 8 or 16 bits")
    if image.has_transparency_data:
        clear = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB"), ("on white",)
    return image.convert("RGB"), ()


def _silence_pillow() -> None:
    """Its warnings (many pixels, odd EXIF) would come once a file; what matters of them is checked here.

    Not at import, which pytest and others undo; not anew each time, or Python would repeat what it shows once.
    """
    if all(module != _PILLOW for _, _, _, module, _ in warnings.filters):
        warnings.filterwarnings("ignore", module=_PILLOW.pattern)
