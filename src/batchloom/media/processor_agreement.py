"""Comparison of a family's token counts with the installed processor."""

from typing import Any

import numpy as np

from batchloom.core.errors import UnusableRecordError
from batchloom.core.medium import AudioFacts, ImageFacts, MediumFacts
from batchloom.media.hf_processor import render_medium
from batchloom.media.processor_families import (
    PatchGridFamily,
    PlaceholderExpansion,
    ProcessorFamily,
    SplitFamily,
)

_PROBE_SIZES = ((28, 28), (336, 224), (37, 640), (1000, 50), (333, 777), (1280, 720), (7, 5))
_PROBE_SAMPLES = (480, 16_000, 16_001, 48_137, 479_999)


def find_processor_disagreement(family: ProcessorFamily, processor: Any, image_processor: Any) -> str:
    """Describe where a family and the installed processor differ; "" if they agree.

    ``image_processor`` supplies grid or tiles if the complete processor cannot be loaded (None).
    """
    for facts in _make_probes(family):
        try:
            expansion = family.expand(facts)
        except UnusableRecordError:
            # A medium that the family refuses never reaches the processor.
            continue
        expected = make_full_text(family, expansion)
        if processor is not None:
            rendered_text = render_medium(processor, family.kind, facts)
            if rendered_text != expected:
                count = rendered_text.count(family.token)
                return f"{_describe_facts(facts)} is written with {count:,} tokens, not {sum(expansion.runs):,}"
        elif isinstance(family, SplitFamily) and isinstance(facts, ImageFacts):
            installed_tiles, expected_tiles = (
                _get_installed_tiles(image_processor, facts),
                family.count_tiles(facts),
            )
            if installed_tiles != (expected_tiles if family.splits else (0, 0)):
                became = f"becomes {installed_tiles} rows and columns of tiles, not {expected_tiles}"
                return f"{_describe_facts(facts)} {became}"
        elif isinstance(family, PatchGridFamily):
            grid = _get_installed_grid(image_processor, facts)
            if grid != expansion.grid:
                return f"{_describe_facts(facts)} becomes a grid of {grid}, not {expansion.grid}"
        else:
            return "the processor cannot be built completely, so it cannot be compared"
    return ""


def make_full_text(family: ProcessorFamily, expansion: PlaceholderExpansion) -> str:
    """Return the text for one medium with all its tokens."""
    segments = expansion.text.split(family.token)
    runs = (family.token * run for run in expansion.runs)
    return "".join(part for pair in zip(segments, (*runs, ""), strict=True) for part in pair)


def _make_probes(family: ProcessorFamily) -> list[MediumFacts]:
    if family.kind == "audio":
        return [AudioFacts(samples, 16_000) for samples in _PROBE_SAMPLES]
    return [ImageFacts(width, height) for width, height in _PROBE_SIZES]


def _get_installed_grid(image_processor: Any, facts: MediumFacts) -> tuple[int, int, int]:
    if not isinstance(facts, ImageFacts):
        raise TypeError("only images have a grid")
    blank = np.zeros((facts.height, facts.width, 3), np.uint8)
    time, rows, columns = np.asarray(image_processor(images=[blank])["image_grid_thw"])[0].tolist()
    return time, rows, columns


def _get_installed_tiles(image_processor: Any, facts: ImageFacts) -> tuple[int, int]:
    blank = np.zeros((facts.height, facts.width, 3), np.uint8)
    output = image_processor(images=[blank], return_row_col_info=True)
    return int(output["rows"][0][0]), int(output["cols"][0][0])


def _describe_facts(facts: MediumFacts) -> str:
    if isinstance(facts, ImageFacts):
        return f"an image of {facts.width} x {facts.height}"
    return f"audio of {facts.samples:,} samples"
