"""The host side of Qwen's vision-language models: pictures and clips to tokens, positions and patches; numpy only."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float32, Int, Int32, UInt8

from models.vision.patches import Grid, merge_positions, patchify, window_order
from models.vision.positions import MediaRun, mrope_positions
from models.vision.resizing import Picture, Size, fit, resized
from omnijax.data.chat import MediaTokens
from omnijax.data.media.image import ImageLimits, load_image
from omnijax.data.media.video import Video, VideoLimits, load_video
from omnijax.data.omni_packing import MediaItem
from omnijax.data.processing import Medium, check_tokens, unread, unwritten
from omnijax.data.sample import Part, RowId
from omnijax.data.spelling import Before, Spelling, spelling
from omnijax.data.tokenizer import Tokenizer
from omnijax.errors import BadRow, UserError
from omnijax.fields import ranged
from omnijax.units import UnitShape

CHANNELS = 3
TOKENS = {
    "image_token": "image_token_id",
    "video_token": "video_token_id",
    "start": "vision_start_token_id",
    "end": "vision_end_token_id",
}
"""Fields that name a token, and where a model's config has its number."""


class Written(NamedTuple):
    """The tokens of a picture or clip, the placeholders among them, and text that stands before them."""

    tokens: list[int]
    runs: list[MediaRun]
    before: str = ""


@dataclass(frozen=True)
class Qwen2VLProcessor:
    """Of Qwen2-VL. Pictures and clips go through one tower, so both are of the modality "image"; a unit is a patch.

    patch_size, merge, temporal_patch_size: as the tower has them: a patch is so many pixels by so many by so many
        frames, `merge` x `merge` of them make a token
    mean, std: of the red, green and blue of a pixel, as shares of 255
    image, video: what pictures and clips may be, and the pixels each picture of them is resized into
    image_token, video_token: what stands where a token of a picture or a clip does, between `start` and `end`
    mrope: whether positions have three axes; else tokens count on like text, for a language model that has one
    """

    patch_size: int = ranged(14, at_least=1)
    merge: int = ranged(2, at_least=1)
    temporal_patch_size: int = ranged(2, at_least=1)
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = ranged((0.26862954, 0.26130258, 0.27577711), above=0)
    image: ImageLimits = field(default_factory=ImageLimits)
    video: VideoLimits = field(default_factory=VideoLimits)
    image_token: str = "<|image_pad|>"
    video_token: str = "<|video_pad|>"
    start: str = "<|vision_start|>"
    end: str = "<|vision_end|>"
    mrope: bool = True

    MODELS: ClassVar[tuple[str, ...]] = ("qwen2_vl",)
    """`model_type` of the models that it is for."""
    SIZES: ClassVar[Mapping[str, str]] = {
        "patch_size": "patch_size",
        "merge": "spatial_merge_size",
        "temporal_patch_size": "temporal_patch_size",
    }
    """Fields that a tower's config has too, and their names there."""

    @property
    def units(self) -> Mapping[str, UnitShape]:
        size = CHANNELS * self.temporal_patch_size * self.patch_size**2
        return {"image": UnitShape((size,), (3,), multiple=self.merge**2)}

    @property
    def position(self) -> tuple[int, ...]:
        return (3,) if self.mrope else ()

    @property
    def frame_rate(self) -> float:
        return self.video.frame_rate

    def settings(self) -> dict[str, Any]:
        return {"family": type(self).__name__, **asdict(self)}

    def check(self, tokenizer: Tokenizer, model: Any) -> None:
        """Raises `UserError` for a token that the tokenizer has not or the model's config numbers otherwise.

        The model must be of `MODELS`, as another's patches stand in another order or its tokens are placed otherwise,
        or have the tower of one.
        """
        name = type(self).__name__
        encoder = getattr(model, "encoders", {}).get("image")
        vision = getattr(model, "vision_config", getattr(encoder, "tower", None))
        if (kind := getattr(model, "HF_TYPE", self.MODELS[0])) not in self.MODELS:
            raise UserError(
                f"Chat.processor = {name} is for {' and '.join(self.MODELS)}, and the model is a {kind}: take its own"
            )
        if (wanted := getattr(vision, "window", None)) != (own := getattr(self, "window", None)) and vision is not None:
            raise UserError(
                f"Chat.processor = {name} has patches in windows of {own}, and the tower in windows of {wanted}: take "
                f"the processor of the tower's family, with the same window"
            )
        check_tokens(self, TOKENS, tokenizer, model)
        text = getattr(model, "text_config", getattr(model, "backbone", None))
        has_axes = hasattr(getattr(text, "rope_scaling", None), "mrope_section")
        if text is not None and has_axes != self.mrope:
            raise UserError(
                f"{name}.mrope = {self.mrope}, and positions of the language model have {3 if has_axes else 1} axes: "
                f"set it to {has_axes}"
            )
        for field_name, theirs in self.SIZES.items():
            own = getattr(self, field_name)
            if (wanted := getattr(vision, theirs, own)) != own:
                raise UserError(
                    f"{name}.{field_name} = {own} and the tower's {theirs} = {wanted}: they must be the same"
                )

    def load(self, part: Part, row: RowId, tokenizer: Tokenizer) -> Medium:
        if part.media is None or part.kind not in ("image", "video"):
            raise unread(part, row)
        if part.trained:
            raise unwritten(part, row)
        if part.kind == "image":
            picture = load_image(part.media, self.image, row)
            frames = resized(picture.pixels, self.picture_size(*picture.pixels.shape[:2]))[None]
            units, grid = patchify(frames, self.patch_size, self.merge, self.temporal_patch_size)
            return self._medium(units, grid, self.picture_tokens(spelling(tokenizer), grid), picture.notes)
        if part.media.audio is not None:
            raise BadRow(
                row, f"message {part.message} has a clip with its sound, and the model hears none: drop the sound"
            )

        def resize(picture: Picture, count: int) -> UInt8[np.ndarray, "h w 3"]:
            return resized(picture, self.clip_size(count, *picture.shape[:2]))

        video = load_video(part.media, self.video, row, resize=resize)
        units, grid = patchify(video.frames, self.patch_size, self.merge, self.temporal_patch_size)
        return self._medium(units, grid, self.clip_tokens(spelling(tokenizer), video, grid), video.notes)

    def picture_size(self, height: int, width: int) -> Size:
        """What a picture is resized to."""
        limits = self.image
        return fit(height, width, self.patch_size * self.merge, limits.min_pixels, limits.max_pixels)

    def clip_size(self, frames: int, height: int, width: int) -> Size:
        """What each picture of a clip of so many is resized to."""
        limits = self.video
        return fit(height, width, self.patch_size * self.merge, limits.min_pixels, limits.max_pixels)

    def picture_tokens(self, spell: Spelling, grid: Grid) -> Written:
        """What stands for a picture."""
        return self._one_run(spell, self.image_token, MediaRun(1, grid))

    def clip_tokens(self, spell: Spelling, video: Video, grid: Grid) -> Written:
        """What stands for a clip."""
        return self._one_run(spell, self.video_token, MediaRun(1, grid))

    def positions(self, length: int, runs: Sequence[MediaRun]) -> tuple[Int32[np.ndarray, "n 3"], int]:
        """Those of `length` tokens with these runs, and the one of a token that follows."""
        return mrope_positions(length, runs, self.merge)

    def unit_order(self, positions: Int[np.ndarray, "N 3"]) -> Int[np.ndarray, "N"]:
        """Where in merge order each patch of the tower's own order stands."""
        return np.arange(len(positions))

    def _one_run(self, spell: Spelling, placeholder: str, run: MediaRun) -> Written:
        """A run between `start` and `end`."""
        between = [spell.token_id(placeholder)] * run.tokens(self.merge)
        return Written([spell.token_id(self.start), *between, spell.token_id(self.end)], [run])

    def _medium(self, units: UInt8[np.ndarray, "N P"], grid: Grid, written: Written, notes: tuple[str, ...]) -> Medium:
        place = merge_positions(grid, self.merge)
        order, merged, length = self.unit_order(place), self.merge**2, len(written.tokens)
        placeholder = np.zeros(length, np.bool_)
        for run in written.runs:
            placeholder[run.first : run.first + run.tokens(self.merge)] = True
        slots = np.full(length, -1, np.int32)
        slots[placeholder] = np.argsort(order[::merged])  # token t of merge order is the tower's number slots[t]
        if self.mrope:
            positions, advance = self.positions(length, written.runs)
        else:
            positions, advance = np.arange(length, dtype=np.int32), length
        count, size = units.shape
        media = MediaItem(
            features=self._normalised(units[order]),
            unit_positions=place[order],
            unit_grid=np.tile(np.array(grid, np.int32), (count, 1)),
            unit_valid=np.full(count, size, np.int32),
            slots=slots,
            encoded=count // merged,
        )
        tokens = MediaTokens(np.array(written.tokens, np.int32), placeholder, written.before)
        return Medium("image", tokens, positions, advance, media, notes)

    def _normalised(self, units: UInt8[np.ndarray, "N P"]) -> Float32[np.ndarray, "N P"]:
        """(share of 255 - mean) / std, looked up: there are only 256 values a channel."""
        shares = (np.arange(256) / 255).astype(np.float32)
        values = [(shares - np.float32(mean)) / np.float32(std) for mean, std in zip(self.mean, self.std, strict=True)]
        by_channel = units.reshape(len(units), CHANNELS, -1)
        return np.stack([values[c][by_channel[:, c]] for c in range(CHANNELS)], 1).reshape(units.shape)


@dataclass(frozen=True)
class Qwen2_5VLProcessor(Qwen2VLProcessor):
    """Of Qwen2.5-VL (arXiv 2502.13923): patches in windows, and time by the second.

    window:            side of a window in patches, as the tower's config has it
    tokens_per_second: positions that time goes on a second of a clip
    """

    window: int = ranged(8, at_least=1)
    tokens_per_second: float | int = ranged(2, above=0)

    MODELS: ClassVar[tuple[str, ...]] = ("qwen2_5_vl",)
    SIZES: ClassVar[Mapping[str, str]] = {**Qwen2VLProcessor.SIZES, "tokens_per_second": "tokens_per_second"}

    def __post_init__(self) -> None:
        if self.window % self.merge:
            raise UserError(f"Qwen2_5VLProcessor.window = {self.window} must be a multiple of merge = {self.merge}")

    def clip_tokens(self, spell: Spelling, video: Video, grid: Grid) -> Written:
        seconds = np.float32(self.temporal_patch_size / video.fps)
        interval = float(np.float32(self.tokens_per_second) * seconds)
        return self._one_run(spell, self.video_token, MediaRun(1, grid, interval))

    def unit_order(self, positions: Int[np.ndarray, "N 3"]) -> Int[np.ndarray, "N"]:
        return window_order(positions, self.window)


@dataclass(frozen=True)
class Qwen3ImageLimits(ImageLimits):
    """As Qwen publishes them with Qwen3-VL."""

    min_pixels: int = ranged(65536, at_least=1)
    max_pixels: int = ranged(16777216, at_least=1)


@dataclass(frozen=True)
class Qwen3VideoLimits(VideoLimits):
    """As Qwen publishes them with Qwen3-VL: min_pixels and max_pixels are of all pictures of a clip together."""

    min_pixels: int = ranged(4096, at_least=1)
    max_pixels: int = ranged(25165824, at_least=1)


@dataclass(frozen=True)
class Qwen3VLProcessor(Qwen2VLProcessor):
    """Of Qwen3-VL: before each frame of a clip stands its moment in words, and a frame is placed like a picture."""

    patch_size: int = ranged(16, at_least=1)
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = ranged((0.5, 0.5, 0.5), above=0)
    image: ImageLimits = field(default_factory=Qwen3ImageLimits)
    video: VideoLimits = field(default_factory=Qwen3VideoLimits)

    MODELS: ClassVar[tuple[str, ...]] = ("qwen3_vl", "qwen3_vl_moe")

    def clip_size(self, frames: int, height: int, width: int) -> Size:
        factor, limits = self.patch_size * self.merge, self.video
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        frames = max(frames, self.temporal_patch_size)  # a single picture is shown as often
        return fit(height, width, factor, limits.min_pixels, limits.max_pixels, frames, self.temporal_patch_size)

    def clip_tokens(self, spell: Spelling, video: Video, grid: Grid) -> Written:
        time, height, width = grid
        last = np.repeat(video.timestamps[-1:], -len(video.timestamps) % self.temporal_patch_size)
        moments = np.concatenate([video.timestamps, last]).reshape(time, -1)
        first, *others = (f"<{moment:.1f} seconds>" for moment in (moments[:, 0] + moments[:, -1]) / 2)
        tokens, runs = list[int](), list[MediaRun]()
        for text in ("", *others):
            tokens += spell.encode(text, Before.TOKEN) if text else []
            run = MediaRun(len(tokens) + 1, (1, height, width))
            tokens += self._one_run(spell, self.video_token, run).tokens
            runs.append(run)
        return Written(tokens, runs, first)
