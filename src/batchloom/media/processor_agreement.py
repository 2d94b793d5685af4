"""Whether a family's arithmetic is that of the installed processor: asked once, before it is trusted."""

from typing import Any

import numpy as np

from batchloom.core.errors import UnusableRecordError
from batchloom.core.medium import AudioFacts, Facts, ImageFacts
from batchloom.media.hf_processor import written_for
from batchloom.media.processor_families import Expansion, Family, PatchGrid, Splits

_SIZES = ((28, 28), (336, 224), (37, 640), (1000, 50), (333, 777), (1280, 720), (7, 5))
_SAMPLES = (480, 16_000, 16_001, 48_137, 479_999)


def disagreement(family: Family, processor: Any, image_processor: Any) -> str:
    """Where a family and the installed processor differ, in words; empty where they agree.

    Args:
        family: the arithmetic.
        processor: of transformers, None where it cannot be made whole.
        image_processor: its part for images; asked for its grid or its pieces where there is no whole.
    """
    for facts in _probes(family):
        try:
            expansion = family.expand(facts)
        except UnusableRecordError:
            # What the family refuses never comes before the processor.
            continue
        expected = full_text(family, expansion)
        if processor is not None:
            found = written_for(processor, family.kind, facts)
            if found != expected:
                count = found.count(family.token)
                return (
                    f"{_told(facts)} is written with {count:,} tokens, not {sum(expansion.runs):,}"
                )
        elif isinstance(family, Splits) and isinstance(facts, ImageFacts):
            pieces, known = _pieces(image_processor, facts), family.pieces(facts)
            if pieces != (known if family.splits else (0, 0)):
                return f"{_told(facts)} becomes {pieces} rows and columns of pieces, not {known}"
        elif isinstance(family, PatchGrid):
            grid = _grid(image_processor, facts)
            if grid != expansion.grid:
                return f"{_told(facts)} becomes a grid of {grid}, not {expansion.grid}"
        else:
            return "the processor cannot be made whole, to be asked"
    return ""


def full_text(family: Family, expansion: Expansion) -> str:
    """All that stands in a text for one medium."""
    pieces = expansion.text.split(family.token)
    runs = (family.token * run for run in expansion.runs)
    return "".join(one for pair in zip(pieces, (*runs, ""), strict=True) for one in pair)


def _probes(family: Family) -> list[Facts]:
    if family.kind == "audio":
        return [AudioFacts(samples, 16_000) for samples in _SAMPLES]
    return [ImageFacts(width, height) for width, height in _SIZES]


def _grid(image_processor: Any, facts: Facts) -> tuple[int, int, int]:
    if not isinstance(facts, ImageFacts):
        raise TypeError("only images have a grid")
    blank = np.zeros((facts.height, facts.width, 3), np.uint8)
    time, rows, columns = np.asarray(image_processor(images=[blank])["image_grid_thw"])[0].tolist()
    return time, rows, columns


def _pieces(image_processor: Any, facts: ImageFacts) -> tuple[int, int]:
    blank = np.zeros((facts.height, facts.width, 3), np.uint8)
    made = image_processor(images=[blank], return_row_col_info=True)
    return int(made["rows"][0][0]), int(made["cols"][0][0])


def _told(facts: Facts) -> str:
    if isinstance(facts, ImageFacts):
        return f"an image of {facts.width} x {facts.height}"
    return f"a sound of {facts.samples:,} samples"
