"""Additional model inputs and batch layouts, by processor class."""

from typing import NamedTuple


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


_TRAITS_BY_PROCESSOR: dict[str, ModelTraits] = {
    **dict.fromkeys(("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor"), ModelTraits(mrope=True)),
    **dict.fromkeys(
        ("Idefics3Processor", "SmolVLMProcessor"),
        ModelTraits(by_row=True, internal_outputs=("rows", "cols")),
    ),
    "Gemma3Processor": ModelTraits(token_types=True, internal_outputs=("num_crops",)),
}


def get_model_traits(name: str) -> ModelTraits:
    """Return the traits of a transformers processor class; defaults for unknown ones."""
    return _TRAITS_BY_PROCESSOR.get(name, ModelTraits())
