"""How many tokens a medium becomes, from its size alone: the arithmetic of families of processors.

Each family does what the processor of transformers it is named after does, in the same order and in the same
floating-point numbers, and is compared with that processor before it is trusted (``media.agreement``).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

from batchloom.core.errors import UnusableRecordError
from batchloom.core.medium import AudioFacts, ImageFacts, MediumFacts, MediumKind

_MAX_SIDE = 4096


class PlaceholderExpansion(NamedTuple):
    """What stands in a text for one medium.

    Attributes:
        text: as the processor writes it, but each run of the medium's token as a single one.
        runs: how many tokens each of these stands for.
        grid: patches of the medium in time, height and width; zeros where the model asks for none.
    """

    text: str
    runs: tuple[int, ...]
    grid: tuple[int, int, int] = (0, 0, 0)


class ProcessorFamily(Protocol):
    """Media of one kind, as one processor treats them."""

    @property
    def kind(self) -> MediumKind:
        """Of the media."""
        ...

    @property
    def placeholder(self) -> str:
        """What a chat template writes for a medium."""
        ...

    @property
    def token(self) -> str:
        """The token whose runs the features of a medium replace."""
        ...

    @property
    def fallback_text(self) -> str:
        """What is written where a template knows no such media, with the placeholder in it."""
        ...

    def expand(self, facts: MediumFacts) -> PlaceholderExpansion:
        """What stands in a text for such a medium.

        Raises:
            UnusableRecordError: the processor takes no such medium.
        """
        ...


@final
@dataclass(frozen=True, slots=True)
class PatchGridFamily:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: an image keeps its form and becomes a grid of patches, some merged to one token.

    Attributes:
        placeholder, token: see :class:`ProcessorFamily`.
        patch: side of a patch in pixels.
        merge: patches a side that become one token.
        least_pixels: an image of fewer is made larger.
        most_pixels: an image of more is made smaller.
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
        """See :class:`ProcessorFamily`."""
        return f"<|vision_start|>{self.placeholder}<|vision_end|>"

    def expand(self, facts: MediumFacts) -> PlaceholderExpansion:
        """See :class:`ProcessorFamily`."""
        image = _require_image(facts)
        height, width = self.compute_resized_size(image)
        rows, columns = height // self.patch, width // self.patch
        count = rows * columns // self.merge**2
        return PlaceholderExpansion(self.token, (count,), (1, rows, columns))

    def compute_resized_size(self, image: ImageFacts) -> tuple[int, int]:
        """Height and width after resizing (``smart_resize`` of transformers' qwen2_vl)."""
        height, width, factor = image.height, image.width, self.patch * self.merge
        if max(height, width) / min(height, width) > 200:
            raise UnusableRecordError(
                f"has {width:,} x {height:,} pixels, and the processor takes none whose one side is more than 200 "
                "times the other: cut it"
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
    """LLaVA, Gemma 3 without pan and scan: every image becomes as many tokens.

    Attributes:
        placeholder, token: see :class:`ProcessorFamily`.
        count: tokens of an image.
        prefix: what the processor writes before them.
        suffix: what it writes behind them.
    """

    placeholder: str
    token: str
    count: int
    prefix: str = ""
    suffix: str = ""
    kind: MediumKind = "image"

    @property
    def fallback_text(self) -> str:
        """See :class:`ProcessorFamily`."""
        return self.placeholder

    def expand(self, facts: MediumFacts) -> PlaceholderExpansion:
        """See :class:`ProcessorFamily`."""
        _require_image(facts)
        return PlaceholderExpansion(f"{self.prefix}{self.token}{self.suffix}", (self.count,))


@final
@dataclass(frozen=True, slots=True)
class TileFamily:
    """LLaVA-NeXT: the image as a whole, and in tiles whose empty borders are left out.

    Attributes:
        placeholder, token: see :class:`ProcessorFamily`.
        pinpoints: heights and widths that tiles may make.
        height: of a tile in pixels.
        width: of a tile in pixels.
        patch: side of a patch in pixels.
        extra: tokens beside those of patches, below 0 where one is left out.
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
        """See :class:`ProcessorFamily`."""
        return self.placeholder

    def expand(self, facts: MediumFacts) -> PlaceholderExpansion:
        """See :class:`ProcessorFamily`."""
        image = _require_image(facts)
        best = self._select_best_resolution(image)
        if best is None:
            raise UnusableRecordError(
                f"has {image.width:,} x {image.height:,} pixels, of which the processor would see none in its tiles: "
                "cut it, one side is far longer than the other"
            )
        rows, columns = self.height // self.patch, self.width // self.patch
        tall, wide = rows * (best[0] // self.height), columns * (best[1] // self.width)
        if image.width / image.height > wide / tall:
            visible_side = int(round(image.height * (wide / image.width), 7))
            tall -= (tall - visible_side) // 2 * 2
        else:
            visible_side = int(round(image.width * (tall / image.height), 7))
            wide -= (wide - visible_side) // 2 * 2
        # One token ends each line of the tiles.
        count = tall * wide + tall + rows * columns + self.extra
        return PlaceholderExpansion(self.token, (count,))

    def _select_best_resolution(self, image: ImageFacts) -> tuple[int, int] | None:
        """The resolution that shows most of an image and wastes least (``select_best_resolution``)."""
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
    """Idefics3, SmolVLM: a large image in pieces, row by row, and then as a whole.

    Attributes:
        placeholder, token: see :class:`ProcessorFamily`.
        count: tokens of a piece.
        separator_token: the token before each piece and at the end.
        global_tag: the tag of the image as a whole.
        longest: to which the longer side is made in pixels.
        side: of a piece in pixels.
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
        """See :class:`ProcessorFamily`."""
        return self.placeholder

    def expand(self, facts: MediumFacts) -> PlaceholderExpansion:
        """See :class:`ProcessorFamily`."""
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
        """Rows and columns of an image, zeros where it is not split.

        As transformers' idefics3 resizes: to the longest side, below 4,096, to multiples of a piece.
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
    """Qwen2-Audio: what a Whisper encoder hears of a sound, two of its frames to a token.

    Attributes:
        placeholder, token: see :class:`ProcessorFamily`.
        rate: samples a second that are heard.
        hop: samples of a frame.
        max_samples: samples that are heard at most.
    """

    placeholder: str
    token: str
    rate: int
    hop: int
    max_samples: int
    kind: MediumKind = "audio"

    @property
    def fallback_text(self) -> str:
        """See :class:`ProcessorFamily`."""
        return f"<|audio_bos|>{self.placeholder}<|audio_eos|>\n"

    def expand(self, facts: MediumFacts) -> PlaceholderExpansion:
        """See :class:`ProcessorFamily`."""
        if not isinstance(facts, AudioFacts):
            raise TypeError(f"a sound is expected, not {type(facts).__name__}")
        samples = facts.samples_at(self.rate)
        if samples > self.max_samples:
            raise UnusableRecordError(
                f"lasts {facts.seconds:.1f} s ({samples:,} samples at {self.rate:,} a second), and the processor hears "
                f"{self.max_samples / self.rate:g} s of a sound ({self.max_samples:,}): the rest would be lost; cut "
                "it into several"
            )
        frames = -(-samples // self.hop)
        count = (((frames - 1) // 2 + 1) - 2) // 2 + 1
        if count < 1:
            raise UnusableRecordError(f"lasts {facts.seconds:.3f} s, too short for the processor to hear anything")
        return PlaceholderExpansion(self.token, (count,))


def _require_image(facts: MediumFacts) -> ImageFacts:
    if not isinstance(facts, ImageFacts):
        raise TypeError(f"an image is expected, not {type(facts).__name__}")
    return facts
