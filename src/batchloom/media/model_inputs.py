"""What models want beside the features of media, by the class of their processor."""

from typing import NamedTuple


class ModelTraits(NamedTuple):
    """How the batches of a model with media differ.

    Attributes:
        mrope: whether positions have a time, a height and a width (M-RoPE), behind those of the text.
        by_row: whether features of the images of a row stand together, ``[rows, images, ...]``.
        token_types: whether ``token_type_ids`` say which tokens are of images.
        internal_outputs: what a processor makes for itself and gives to no model.
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
    """The traits of a processor class of transformers; the plain ones of a class that is not known."""
    return _TRAITS_BY_PROCESSOR.get(name, ModelTraits())
