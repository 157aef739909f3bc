"""Pictures in the sizes that a tower takes; numpy and Pillow only.

Resizing is Pillow's bicubic on bytes, so pixel values are those of transformers' `Qwen2VLImageProcessorPil`, also for
clips. Its processors on torchvision differ from that by one of 255 levels here and there.
"""

import math

import numpy as np
from jaxtyping import UInt8
from PIL import Image

Picture = UInt8[np.ndarray, "H W 3"]
Size = tuple[int, int]
"""(height, width) in pixels."""


def fit(height: int, width: int, factor: int, least: int, most: int, frames: int = 1, together: int = 1) -> Size:
    """The size next to this one whose sides are multiples of `factor` and whose pixels are from `least` to `most`.

    It is the family's `smart_resize`. The pixels are of all `frames`, whose number is rounded to `together` first; a
    very flat picture may have more than `most`, as no side is less than `factor`.
    """
    counted = round(frames / together) * together
    rounded = round(height / factor) * factor, round(width / factor) * factor
    pixels = counted * rounded[0] * rounded[1]
    if pixels > most:
        shrink = math.sqrt(frames * height * width / most)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if pixels < least:
        grow = math.sqrt(least / (frames * height * width))
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rounded


def resized(picture: Picture, size: Size) -> UInt8[np.ndarray, "h w 3"]:
    """A picture in another size (height, width), by Pillow's bicubic filter."""
    if picture.shape[:2] == size:
        return picture
    height, width = size
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC))
