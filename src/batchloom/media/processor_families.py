"""Token counts of media from their size alone, per family of processors.

Each family repeats the operations of the transformers processor it is named after, in the same order and
floating-point precision, and is compared with it before use (``media.processor_agreement``).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

from batchloom.core.errors import UnusableRecordError
from batchloom.core.medium import AudioFacts, ImageFacts, MediumFacts, MediumKind

_MAX_SIDE = 4096


class PlaceholderExpansion(NamedTuple):
    """Text for one medium.

    Attributes:
        text: the processor's text, with each run of the medium's token collapsed to one.
        runs: length of each run.
        grid: patches of the medium in time, height and width; zeros if the model needs none.
    """

    text: str
    runs: tuple[int, ...]
    grid: tuple[int, int, int] = (0, 0, 0)


class ProcessorFamily(Protocol):
    """Token counts of one kind of media under one processor."""

    @property
    def kind(self) -> MediumKind:
        """Kind of the media."""
        ...

    @property
    def placeholder(self) -> str:
        """Text that a chat template writes for a medium."""
        ...

    @property
    def token(self) -> str:
        """Token whose runs are replaced by the features of a medium."""
        ...

    @property
    def fallback_text(self) -> str:
        """Text, with the placeholder, for templates that do not support such media."""
        ...

    def expand(self, facts: MediumFacts) -> PlaceholderExpansion:
        """Return the text for a medium of this size.

        Raises:
            UnusableRecordError: the processor does not accept the medium.
        """
        ...


@final
@dataclass(frozen=True, slots=True)
class PatchGridFamily:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: a grid of patches that keeps the aspect ratio.

    Attributes:
        placeholder, token, kind: see :class:`ProcessorFamily`.
        patch: side of a patch in pixels.
        merge: side, in patches, of the square that becomes one token.
        least_pixels: smaller images are enlarged.
        most_pixels: larger images are shrunk.
    """

    placeholder: str
    token: str
    patch: int
    merge: int
    least_pixels: int
    most_pixels: int
    kind: MediumKind = "image"

    @property
    def fallback_text(self) -> str:
        return f"<|vision_start|>{self.placeholder}<|vision_end|>"

    def expand(self, facts: MediumFacts) -> PlaceholderExpansion:
        image = _require_image(facts)
        height, width = self.compute_resized_size(image)
        rows, columns = height // self.patch, width // self.patch
        count = rows * columns // self.merge**2
        return PlaceholderExpansion(self.token, (count,), (1, rows, columns))

    def compute_resized_size(self, image: ImageFacts) -> tuple[int, int]:
        """Return height and width after ``smart_resize`` of transformers' qwen2_vl."""
        height, width, factor = image.height, image.width, self.patch * self.merge
        if max(height, width) / min(height, width) > 200:
            raise UnusableRecordError(
                f"has {width:,} x {height:,} pixels, but the processor takes no image with one side more than 200 "
                "times the other: crop it"
            )
        tall, wide = round(height / factor) * factor, round(width / factor) * factor
        if tall * wide > self.most_pixels:
            beta = math.sqrt((height * width) / self.most_pixels)
            tall = max(factor, math.floor(height / beta / factor) * factor)
            wide = max(factor, math.floor(width / beta / factor) * factor)
        elif tall * wide < self.least_pixels:
            beta = math.sqrt(self.least_pixels / (height * width))
            tall = math.ceil(height * beta / factor) * factor
            wide = math.ceil(width * beta / factor) * factor
        return tall, wide


@final
@dataclass(frozen=True, slots=True)
class FixedSizeFamily:
    """LLaVA, Gemma 3 without pan and scan: a constant number of tokens per image.

    Attributes:
        placeholder, token, kind: see :class:`ProcessorFamily`.
        count: tokens of an image.
        prefix: text before them.
        suffix: text after them.
    """

    placeholder: str
    token: str
    count: int
    prefix: str = ""
    suffix: str = ""
    kind: MediumKind = "image"

    @property
    def fallback_text(self) -> str:
        return self.placeholder

    def expand(self, facts: MediumFacts) -> PlaceholderExpansion:
        _require_image(facts)
        return PlaceholderExpansion(f"{self.prefix}{self.token}{self.suffix}", (self.count,))


@final
@dataclass(frozen=True, slots=True)
class TileFamily:
    """LLaVA-NeXT: the complete image, then tiles without their empty borders.

    Attributes:
        placeholder, token, kind: see :class:`ProcessorFamily`.
        pinpoints: allowed (height, width) of the tiled image.
        height: height of a tile in pixels.
        width: width of a tile in pixels.
        patch: side of a patch in pixels.
        extra: tokens in addition to the patches; negative if one is dropped.
    """

    placeholder: str
    token: str
    pinpoints: tuple[tuple[int, int], ...]
    height: int
    width: int
    patch: int
    extra: int
    kind: MediumKind = "image"

    @property
    def fallback_text(self) -> str:
        return self.placeholder

    def expand(self, facts: MediumFacts) -> PlaceholderExpansion:
        image = _require_image(facts)
        best = self._select_best_resolution(image)
        if best is None:
            raise UnusableRecordError(
                f"has {image.width:,} x {image.height:,} pixels, and the processor would put none of them into its "
                "tiles, because one side is much longer than the other: crop it"
            )
        rows, columns = self.height // self.patch, self.width // self.patch
        tall, wide = rows * (best[0] // self.height), columns * (best[1] // self.width)
        if image.width / image.height > wide / tall:
            visible_side = int(round(image.height * (wide / image.width), 7))
            tall -= (tall - visible_side) // 2 * 2
        else:
            visible_side = int(round(image.width * (tall / image.height), 7))
            wide -= (wide - visible_side) // 2 * 2
        # Each row of the tiles ends with one token.
        count = tall * wide + tall + rows * columns + self.extra
        return PlaceholderExpansion(self.token, (count,))

    def _select_best_resolution(self, image: ImageFacts) -> tuple[int, int] | None:
        """Return the resolution with most visible and least wasted pixels.

        The algorithm is transformers' ``select_best_resolution``.
        """
        best, most, least = None, 0, math.inf
        for height, width in self.pinpoints:
            scale = min(width / image.width, height / image.height)
            visible_pixels = int(image.width * scale) * int(image.height * scale)
            effective = min(visible_pixels, image.width * image.height)
            wasted = height * width - effective
            if effective > most or (effective == most and wasted < least):
                best, most, least = (height, width), effective, wasted
        return best


@final
@dataclass(frozen=True, slots=True)
class SplitFamily:
    """Idefics3, SmolVLM: a large image in tiles, row by row, then the complete image.

    Attributes:
        placeholder, token, kind: see :class:`ProcessorFamily`.
        count: tokens of a tile.
        separator_token: token before each tile and at the end.
        global_tag: tag of the complete image.
        longest: length of the longer side after resizing, in pixels.
        side: side of a tile in pixels.
        splits: whether images are split.
    """

    placeholder: str
    token: str
    count: int
    separator_token: str
    global_tag: str
    longest: int
    side: int
    splits: bool
    kind: MediumKind = "image"

    @property
    def fallback_text(self) -> str:
        return self.placeholder

    def expand(self, facts: MediumFacts) -> PlaceholderExpansion:
        rows, columns = self.count_tiles(_require_image(facts)) if self.splits else (0, 0)
        end = f"{self.separator_token}{self.global_tag}{self.token}{self.separator_token}"
        if not rows:
            return PlaceholderExpansion(end, (self.count,))
        lines = (
            "".join(f"{self.separator_token}<row_{row}_col_{column}>{self.token}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        )
        text = "".join(f"{line}\n" for line in lines) + f"\n{end}"
        return PlaceholderExpansion(text, (self.count,) * (rows * columns + 1))

    def count_tiles(self, image: ImageFacts) -> tuple[int, int]:
        """Return rows and columns of an image, zeros if it is not split.

        As in transformers' idefics3, the image is resized to the longest side, below 4,096, and to multiples of a tile.
        """
        height, width = self._resize_longest_side(image.height, image.width)
        aspect = width / height
        if width >= height and width > _MAX_SIDE:
            height, width = int(_MAX_SIDE / aspect), _MAX_SIDE
        elif height > width and height > _MAX_SIDE:
            height, width = _MAX_SIDE, int(_MAX_SIDE * aspect)
        height, width = max(height, 1), max(width, 1)
        aspect, side = width / height, self.side
        if width >= height:
            width = math.ceil(width / side) * side
            height = math.ceil(int(width / aspect) / side) * side
        else:
            height = math.ceil(height / side) * side
            width = math.ceil(int(height * aspect) / side) * side
        if height <= side and width <= side:
            return 0, 0
        return (height - side) // side + 1, (width - side) // side + 1

    def _resize_longest_side(self, height: int, width: int) -> tuple[int, int]:
        aspect = width / height
        if width >= height:
            width = self.longest
            height = int(width / aspect)
            height += height % 2
        else:
            height = self.longest
            width = int(height * aspect)
            width += width % 2
        return max(height, 1), max(width, 1)


@final
@dataclass(frozen=True, slots=True)
class WhisperFamily:
    """Qwen2-Audio: frames of a Whisper encoder, two per token.

    Attributes:
        placeholder, token, kind: see :class:`ProcessorFamily`.
        rate: sampling rate of the encoder's input.
        hop: samples per frame.
        max_samples: maximum number of samples.
    """

    placeholder: str
    token: str
    rate: int
    hop: int
    max_samples: int
    kind: MediumKind = "audio"

    @property
    def fallback_text(self) -> str:
        return f"<|audio_bos|>{self.placeholder}<|audio_eos|>\n"

    def expand(self, facts: MediumFacts) -> PlaceholderExpansion:
        if not isinstance(facts, AudioFacts):
            raise TypeError(f"audio is expected, not {type(facts).__name__}")
        samples = facts.samples_at(self.rate)
        if samples > self.max_samples:
            raise UnusableRecordError(
                f"lasts {facts.seconds:.1f} s ({samples:,} samples at {self.rate:,} per second), but the processor "
                f"takes at most {self.max_samples / self.rate:g} s of audio ({self.max_samples:,}): the rest would "
                "be lost; split it into several files"
            )
        frames = -(-samples // self.hop)
        count = (((frames - 1) // 2 + 1) - 2) // 2 + 1
        if count < 1:
            raise UnusableRecordError(f"lasts {facts.seconds:.3f} s, too short for the processor")
        return PlaceholderExpansion(self.token, (count,))


def _require_image(facts: MediumFacts) -> ImageFacts:
    if not isinstance(facts, ImageFacts):
        raise TypeError(f"an image is expected, not {type(facts).__name__}")
    return facts
