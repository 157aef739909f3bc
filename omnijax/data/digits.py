"""Handwritten digits, asked and answered in words: pictures for a first run that downloads nothing."""

import functools
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from omnijax.data.chat_source import Chat
from omnijax.data.sample import RowId

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class Digits(Chat):
    """The 1,797 digits of 8 x 8 pixels that come with scikit-learn (Alpaydin and Kaynak 1998, CC BY 4.0), as chats.

    The user shows one and asks `question`; the answer is its name. `path` is what they are called, not a file.
    """

    path: str | tuple[str, ...] = "sklearn.datasets.load_digits"
    template: str = "plain"
    name: str = "digits"
    question: str = "Which digit?"

    def open(self) -> "DigitRows":
        return DigitRows(self.name, self.question)


@dataclass(frozen=True)
class DigitRows:
    """A chat of each digit."""

    name: str
    question: str

    def __len__(self) -> int:
        return len(_digits()[1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        pictures, numbers = _digits()
        file = io.BytesIO()
        Image.fromarray(pictures[index]).save(file, "png")
        picture = {"type": "image", "image": file.getvalue()}
        asked = {"role": "user", "content": [picture, {"type": "text", "text": self.question}]}
        return {"messages": [asked, {"role": "assistant", "content": WORDS[numbers[index]]}]}

    def row_id(self, index: int) -> RowId:
        return RowId(self.name, "digits", range(len(self))[index])


@functools.cache
def _digits() -> tuple[UInt8[np.ndarray, "digits 8 8"], tuple[int, ...]]:
    from sklearn.datasets import load_digits  # a second to import, where nobody may want it

    found = load_digits()
    # Values are 0 to 16. Writers follow one another: in an order that mixes them, the last are held out.
    order = np.random.default_rng(0).permutation(len(found.target))
    return np.rint(found.images[order] * (255 / 16)).astype(np.uint8), tuple(int(n) for n in found.target[order])
