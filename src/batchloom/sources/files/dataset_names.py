"""Datasets with a short name: their location and size."""

from dataclasses import dataclass
from typing import Any

from batchloom.core.synthetic_data import DISTRIBUTED_DUMMY, DUMMY, SYNTHETIC, SYNTHETIC_NAMES

# Larger datasets are streamed by default; others are downloaded once.
STREAMING_MIN_BYTES = 10 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetPreset:
    """A Hub dataset with a short name.

    Attributes:
        name: short name.
        description: content, in one sentence.
        repository: name of the repository on the Hub.
        config: name of the configuration.
        split: name of the split.
        text_field: field that holds the text.
        tokenizer: usual tokenizer; ``prepare`` takes any.
        bytes: approximate size of its files.
    """

    name: str
    description: str
    repository: str
    config: str = "default"
    split: str = "train"
    text_field: str = "text"
    tokenizer: str = "gpt2"
    bytes: int

    @property
    def location(self) -> str:
        """Input that the name refers to."""
        return f"{self.repository}:{self.config}/{self.split}"


# Sizes are those of the split's files, as listed in the repositories.
_PRESETS = (
    DatasetPreset(
        name="fineweb",
        description="Cleaned English web text: a random sample of 10 billion GPT-2 tokens out of about 15 trillion "
        "(the complete set is HuggingFaceFW/fineweb:default/train).",
        repository="HuggingFaceFW/fineweb",
        config="sample-10BT",
        bytes=27_600_000_000,
    ),
    DatasetPreset(
        name="fineweb-edu",
        description="Educational English web text: a random sample of 10 billion GPT-2 tokens out of 1.3 trillion "
        "(the complete set is HuggingFaceFW/fineweb-edu:default/train).",
        repository="HuggingFaceFW/fineweb-edu",
        config="sample-10BT",
        bytes=28_500_000_000,
    ),
    DatasetPreset(
        name="pile",
        description="The Pile without its copyrighted parts: papers, code, web pages, books, dialogue; mostly English.",
        repository="monology/pile-uncopyrighted",
        bytes=335_000_000_000,
    ),
    DatasetPreset(
        name="shakespeare",
        description="The First Folio: 36 plays of Shakespeare, one play per document; 30 of them for training.",
        repository="gvlassis/shakespearefirstfolio",
        bytes=2_600_000,
    ),
    DatasetPreset(
        name="tiny_shakespeare",
        description="40,000 lines of Shakespeare as one text, the classic data of character models.",
        repository="karpathy/tiny_shakespeare",
        bytes=634_000,
    ),
)


_SYNTHETIC_DESCRIPTIONS = {
    DISTRIBUTED_DUMMY: "Synthetic documents for throughput tests; each rank reads its own share.",
    DUMMY: "Synthetic documents for throughput tests; every rank reads the same share.",
}


def find_preset(name: str) -> DatasetPreset | None:
    """Return the dataset of a short name, or None."""
    return next((preset for preset in _PRESETS if preset.name == name), None)


def list_preset_names() -> list[str]:
    """Return all short names."""
    return [*SYNTHETIC_NAMES, *(preset.name for preset in _PRESETS)]


def list_datasets() -> list[dict[str, Any]]:
    """List the datasets with a short name as dictionaries of plain values.

    Keys: ``name``, ``description``, ``repository``, ``config``, ``split``, ``text_field``,
    ``tokenizer``, ``bytes`` (approximate), ``size`` (the same, formatted), ``streaming`` (whether
    ``prepare`` reads it remotely by default), ``input`` (the input that the name refers to),
    ``source``: ``real``, or ``synthetic`` for generated data of any size without a repository.
    """
    synthetic_datasets = [
        {
            "name": name,
            "description": description,
            "repository": "",
            "config": "",
            "split": "train",
            "text_field": "",
            "tokenizer": "none",
            "bytes": 0,
            "size": "any",
            "streaming": False,
            "input": name,
            "source": SYNTHETIC,
        }
        for name, description in _SYNTHETIC_DESCRIPTIONS.items()
    ]
    return synthetic_datasets + [
        {
            "name": preset.name,
            "description": preset.description,
            "repository": preset.repository,
            "config": preset.config,
            "split": preset.split,
            "text_field": preset.text_field,
            "tokenizer": preset.tokenizer,
            "bytes": preset.bytes,
            "size": _format_preset_size(preset.bytes),
            "streaming": preset.bytes > STREAMING_MIN_BYTES,
            "input": preset.location,
            "source": "real",
        }
        for preset in _PRESETS
    ]


def _format_preset_size(size: int) -> str:
    unit, name = (10**9, "GB") if size >= 10**9 else (10**6, "MB")
    return f"{size / unit:.1f} {name}"
