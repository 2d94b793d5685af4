"""Processors with a known token count, and the settings that it depends on."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from batchloom.media.processor_families import (
    FixedSizeFamily,
    PatchGridFamily,
    ProcessorFamily,
    SplitFamily,
    TileFamily,
    WhisperFamily,
)


class ProcessorParts(NamedTuple):
    """Parts of a processor.

    Attributes:
        config: settings in ``processor_config.json``.
        image: image processor of transformers, or None.
        sound: feature extractor of transformers, or None.
        tokens: special tokens of its tokenizer, by attribute name.
    """

    config: Mapping[str, Any]
    image: Any
    sound: Any
    tokens: Mapping[str, str]


def find_known_family(name: str, parts: ProcessorParts) -> ProcessorFamily | None:
    """Return the family of a processor class; None if class or settings are unknown."""
    make = _KNOWN_FAMILIES.get(name)
    return None if make is None else make(parts)


def _make_patch_grid(parts: ProcessorParts) -> ProcessorFamily | None:
    token = parts.tokens.get("image_token", "<|image_pad|>")
    image = parts.image
    size = _get_size(image, "size")
    least, most = size.get("shortest_edge"), size.get("longest_edge")
    if image is None or not (image.do_resize and least and most):
        return None
    return PatchGridFamily(token, token, image.patch_size, image.merge_size, least, most)


def _make_llava(parts: ProcessorParts) -> ProcessorFamily | None:
    encoder_size, patch = _get_encoder_size(parts), parts.config.get("patch_size")
    if encoder_size is None or not patch:
        return None
    token = _get_image_token(parts)
    count = (encoder_size[0] // patch) * (encoder_size[1] // patch) + _count_extra_tokens(parts)
    return FixedSizeFamily(token, token, count)


def _make_tiles(parts: ProcessorParts) -> ProcessorFamily | None:
    encoder_size, patch = _get_encoder_size(parts), parts.config.get("patch_size")
    if encoder_size is None or not patch:
        return None
    token = _get_image_token(parts)
    pinpoints = tuple((tall, wide) for tall, wide in parts.image.image_grid_pinpoints)
    return TileFamily(token, token, pinpoints, *encoder_size, patch, _count_extra_tokens(parts))


def _make_splits(parts: ProcessorParts) -> ProcessorFamily | None:
    longest = _get_size(parts.image, "size").get("longest_edge")
    side = _get_size(parts.image, "max_image_size").get("longest_edge")
    if not (longest and side and parts.image.do_resize):
        return None
    get_token = parts.tokens.get
    token = get_token("image_token", "<image>")
    return SplitFamily(
        *(token, token),
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


def _get_image_token(parts: ProcessorParts) -> str:
    token: str = parts.tokens.get("image_token") or parts.config.get("image_token", "<image>")
    return token


def _count_extra_tokens(parts: ProcessorParts) -> int:
    extra: int = parts.config.get("num_additional_image_tokens", 0)
    return extra - (parts.config.get("vision_feature_select_strategy") == "default")


def _get_encoder_size(parts: ProcessorParts) -> tuple[int, int] | None:
    """Return height and width of the vision encoder's input; None if they vary."""
    image = parts.image
    if image is None:
        return None
    size = _get_size(image, "crop_size") if image.do_center_crop else _get_size(image, "size")
    if size.get("height") and size.get("width"):
        return size["height"], size["width"]
    return None


def _get_size(image: Any, name: str) -> dict[str, int]:
    """Return the fields of an image processor's size that are set."""
    size = getattr(image, name, None)
    names = ("height", "width", "shortest_edge", "longest_edge")
    if isinstance(size, Mapping):
        return {key: size[key] for key in names if size.get(key)}
    return {key: value for key in names if (value := getattr(size, key, None))}


_KNOWN_FAMILIES: dict[str, Callable[[ProcessorParts], ProcessorFamily | None]] = {
    **dict.fromkeys(("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor"), _make_patch_grid),
    "LlavaProcessor": _make_llava,
    "LlavaNextProcessor": _make_tiles,
    **dict.fromkeys(("Idefics3Processor", "SmolVLMProcessor"), _make_splits),
    "Gemma3Processor": _make_gemma3,
    "Qwen2AudioProcessor": _make_audio_encoder,
}
