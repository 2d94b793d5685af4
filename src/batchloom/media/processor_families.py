"""Token counts, model inputs and positions of media, per family of processors.

Token counts follow from the size of a medium alone. Each family repeats the operations of the transformers processor
it is named after, in the same order and floating-point precision, and is compared with it before use
(``media.processor``).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

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


@dataclass(frozen=True, slots=True)
class ProcessorFamily:
    """Token counts of one kind of media under one processor.

    Attributes:
        placeholder: text that a chat template writes for a medium.
        token: token whose runs are replaced by the features of a medium.
        kind: kind of the media.
    """

    placeholder: str
    token: str
    kind: MediumKind = field(default="image", kw_only=True)

    @property
    def fallback_text(self) -> str:
        """Text, with the placeholder, for templates that do not support such media."""
        return self.placeholder

    def expand(self, facts: MediumFacts) -> PlaceholderExpansion:
        """Return the text for a medium of this size.

        Raises:
            UnusableRecordError: the processor does not accept the medium.
        """
        raise NotImplementedError


@final
@dataclass(frozen=True, slots=True)
class PatchGridFamily(ProcessorFamily):
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: a grid of patches that keeps the aspect ratio."""

    # Side of a patch in pixels, and side, in patches, of the square that becomes one token.
    patch: int
    merge: int
    # Smaller images are enlarged, larger ones are shrunk.
    least_pixels: int
    most_pixels: int

    @property
    def fallback_text(self) -> str:
        return f"<|vision_start|>{self.placeholder}<|vision_end|>"

    def expand(self, facts: MediumFacts) -> PlaceholderExpansion:
        image = _require_image(facts)
        height, width = self.compute_resized_size(image)
        rows = height // self.patch
        columns = width // self.patch
        count = rows * columns // self.merge**2
        return PlaceholderExpansion(self.token, (count,), (1, rows, columns))

    def compute_resized_size(self, image: ImageFacts) -> tuple[int, int]:
        """Return height and width after ``smart_resize`` of transformers' qwen2_vl."""
        height = image.height
        width = image.width
        factor = self.patch * self.merge
        if max(height, width) / min(height, width) > 200:
            raise UnusableRecordError(
                f"has {width:,} x {height:,} pixels, but the processor takes no image with one side more than 200 "
                "times the other: crop it"
            )
        tall = round(height / factor) * factor
        wide = round(width / factor) * factor
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
class FixedSizeFamily(ProcessorFamily):
    """LLaVA, Gemma 3 without pan and scan: a constant number of tokens per image."""

    count: int
    prefix: str = ""
    suffix: str = ""

    def expand(self, facts: MediumFacts) -> PlaceholderExpansion:
        _require_image(facts)
        return PlaceholderExpansion(f"{self.prefix}{self.token}{self.suffix}", (self.count,))


@final
@dataclass(frozen=True, slots=True)
class TileFamily(ProcessorFamily):
    """LLaVA-NeXT: the complete image, then tiles without their empty borders."""

    # Allowed (height, width) of the tiled image, in pixels as all sizes.
    pinpoints: tuple[tuple[int, int], ...]
    height: int
    width: int
    patch: int
    # Tokens in addition to the patches; negative if one is dropped.
    extra: int

    def expand(self, facts: MediumFacts) -> PlaceholderExpansion:
        image = _require_image(facts)
        best = self._select_best_resolution(image)
        if best is None:
            raise UnusableRecordError(
                f"has {image.width:,} x {image.height:,} pixels, and the processor would put none of them into its "
                "tiles, because one side is much longer than the other: crop it"
            )
        rows = self.height // self.patch
        columns = self.width // self.patch
        tall = rows * (best[0] // self.height)
        wide = columns * (best[1] // self.width)
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
        best = None
        most = 0
        least = math.inf
        for height, width in self.pinpoints:
            scale = min(width / image.width, height / image.height)
            visible_pixels = int(image.width * scale) * int(image.height * scale)
            effective = min(visible_pixels, image.width * image.height)
            wasted = height * width - effective
            if effective > most or (effective == most and wasted < least):
                best = (height, width)
                most = effective
                least = wasted
        return best


@final
@dataclass(frozen=True, slots=True)
class SplitFamily(ProcessorFamily):
    """Idefics3, SmolVLM: a large image in tiles, row by row, then the complete image."""

    count: int
    separator_token: str
    global_tag: str
    # Length of the longer side after resizing, and side of a tile, in pixels.
    longest: int
    side: int
    splits: bool

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
            height = int(_MAX_SIDE / aspect)
            width = _MAX_SIDE
        elif height > width and height > _MAX_SIDE:
            height = _MAX_SIDE
            width = int(_MAX_SIDE * aspect)
        height = max(height, 1)
        width = max(width, 1)
        aspect = width / height
        side = self.side
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
class WhisperFamily(ProcessorFamily):
    """Qwen2-Audio: frames of a Whisper encoder, two per token."""

    rate: int
    hop: int
    max_samples: int
    kind: MediumKind = field(default="audio", kw_only=True)

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


class ProcessorParts(NamedTuple):
    """Parts of a processor."""

    config: Mapping[str, Any]
    image: Any
    sound: Any
    tokens: Mapping[str, str]

    @property
    def image_token(self) -> str:
        """Placeholder token of a part of an image."""
        token: str = self.tokens.get("image_token") or self.config.get("image_token", "<image>")
        return token

    @property
    def extra_tokens(self) -> int:
        """Number of tokens of an image besides those of its patches."""
        extra: int = self.config.get("num_additional_image_tokens", 0)
        return extra - (self.config.get("vision_feature_select_strategy") == "default")

    @property
    def encoder_size(self) -> tuple[int, int] | None:
        """Height and width of the vision encoder's input; None if they vary."""
        image = self.image
        if image is None:
            return None
        size = _get_size(image, "crop_size") if image.do_center_crop else _get_size(image, "size")
        if size.get("height") and size.get("width"):
            return size["height"], size["width"]
        return None


class ModelTraits(NamedTuple):
    """Differences in the batches of a model with media.

    Attributes:
        mrope: whether positions add time, height and width (M-RoPE) after those of the text.
        by_row: whether image features are grouped by row, ``[rows, images, ...]``.
        token_types: whether ``token_type_ids`` mark the image tokens.
        internal_outputs: processor outputs that no model takes.
    """

    mrope: bool = False
    by_row: bool = False
    token_types: bool = False
    internal_outputs: tuple[str, ...] = ()


def _make_patch_grid(parts: ProcessorParts) -> ProcessorFamily | None:
    token = parts.tokens.get("image_token", "<|image_pad|>")
    image = parts.image
    size = _get_size(image, "size")
    least = size.get("shortest_edge")
    most = size.get("longest_edge")
    if image is None or not (image.do_resize and least and most):
        return None
    return PatchGridFamily(token, token, image.patch_size, image.merge_size, least, most)


def _make_llava(parts: ProcessorParts) -> ProcessorFamily | None:
    encoder_size = parts.encoder_size
    patch = parts.config.get("patch_size")
    if encoder_size is None or not patch:
        return None
    token = parts.image_token
    count = (encoder_size[0] // patch) * (encoder_size[1] // patch) + parts.extra_tokens
    return FixedSizeFamily(token, token, count)


def _make_tiles(parts: ProcessorParts) -> ProcessorFamily | None:
    encoder_size = parts.encoder_size
    patch = parts.config.get("patch_size")
    if encoder_size is None or not patch:
        return None
    token = parts.image_token
    pinpoints = tuple((tall, wide) for tall, wide in parts.image.image_grid_pinpoints)
    return TileFamily(token, token, pinpoints, *encoder_size, patch, parts.extra_tokens)


def _make_splits(parts: ProcessorParts) -> ProcessorFamily | None:
    longest = _get_size(parts.image, "size").get("longest_edge")
    side = _get_size(parts.image, "max_image_size").get("longest_edge")
    if not (longest and side and parts.image.do_resize):
        return None
    get_token = parts.tokens.get
    token = get_token("image_token", "<image>")
    return SplitFamily(
        token,
        token,
        parts.config.get("image_seq_len", 169),
        get_token("fake_image_token", "<fake_token_around_image>"),
        get_token("global_image_token", "<global-img>"),
        longest,
        side,
        bool(parts.image.do_image_splitting),
    )


def _make_gemma3(parts: ProcessorParts) -> ProcessorFamily | None:
    tokens = parts.tokens
    token_names = ("boi_token", "eoi_token", "image_token")
    if parts.image is None or parts.image.do_pan_and_scan or not all(name in tokens for name in token_names):
        return None
    before, behind, token = (tokens[name] for name in token_names)
    count = parts.config.get("image_seq_length", 256)
    return FixedSizeFamily(before, token, count, f"\n\n{before}", f"{behind}\n\n")


def _make_audio_encoder(parts: ProcessorParts) -> ProcessorFamily | None:
    sound = parts.sound
    if sound is None:
        return None
    token = parts.tokens.get("audio_token") or parts.config.get("audio_token", "<|AUDIO|>")
    return WhisperFamily(token, token, sound.sampling_rate, sound.hop_length, sound.n_samples)


def _get_size(image: Any, name: str) -> dict[str, int]:
    """Return the fields of an image processor's size that are set."""
    size = getattr(image, name, None)
    names = ("height", "width", "shortest_edge", "longest_edge")
    if isinstance(size, Mapping):
        return {key: size[key] for key in names if size.get(key)}
    return {key: value for key in names if (value := getattr(size, key, None))}


FamilyMaker = Callable[[ProcessorParts], ProcessorFamily | None]
_QWEN_VL = (_make_patch_grid, ModelTraits(mrope=True))
_SPLITTING = (_make_splits, ModelTraits(by_row=True, internal_outputs=("rows", "cols")))
_KNOWN_PROCESSORS: dict[str, tuple[FamilyMaker, ModelTraits]] = {
    **dict.fromkeys(("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor"), _QWEN_VL),
    "LlavaProcessor": (_make_llava, ModelTraits()),
    "LlavaNextProcessor": (_make_tiles, ModelTraits()),
    **dict.fromkeys(("Idefics3Processor", "SmolVLMProcessor"), _SPLITTING),
    "Gemma3Processor": (_make_gemma3, ModelTraits(token_types=True, internal_outputs=("num_crops",))),
    "Qwen2AudioProcessor": (_make_audio_encoder, ModelTraits()),
}


def find_known_family(name: str, parts: ProcessorParts) -> ProcessorFamily | None:
    """Return the family of a processor class; None if class or settings are unknown."""
    known = _KNOWN_PROCESSORS.get(name)
    return None if known is None else known[0](parts)


def get_model_traits(name: str) -> ModelTraits:
    """Return the traits of a transformers processor class; defaults for unknown ones."""
    known = _KNOWN_PROCESSORS.get(name)
    return ModelTraits() if known is None else known[1]


PatchGridShape = tuple[int, int, int]


def compute_mrope_positions(
    length: int, media: Sequence[tuple[int, int, PatchGridShape]], merge: int
) -> NDArray[np.int64]:
    """Return M-RoPE positions as transformers' ``get_rope_index``, int64 [3, length].

    Text counts up equally in all three rows. A medium's tokens have the positions of their patches, and the next
    text continues after the medium's longest side.

    Args:
        length: tokens of the document.
        media: (first token, tokens, patches in time, height and width) of each medium, in order.
        merge: side, in patches, of the square that is one token.
    """
    positions = np.empty((3, length), np.int64)
    next_token = next_position = 0
    for start, tokens, (time, rows, columns) in media:
        positions[:, next_token:start] = np.arange(next_position, next_position + start - next_token)
        next_position += start - next_token
        shape = (time, rows // merge, columns // merge)
        positions[:, start : start + tokens] = np.indices(shape).reshape(3, -1) + next_position
        next_position += max(shape[1:])
        next_token = start + tokens
    positions[:, next_token:] = np.arange(next_position, next_position + length - next_token)
    return positions
