"""``batchloom inspect``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import batchloom
from batchloom.analysis import Inspection
from batchloom.cli.options import Argument, AsJson, Generation, Option, Split
from batchloom.cli.terminal import Line, make_table, report
from batchloom.core.wording import format_count, format_list
from batchloom.preparation import describe_missed_shares
from batchloom.store import MANIFEST_NAME, PAGE_NAME, read_manifest
from batchloom.store.format import OBJECTIVES, format_generation_file_name

_BAR_WIDTH = 40
_MAX_WEIGHTS = 8


def inspect(
    path: Annotated[
        str,
        Argument(metavar="STORE", help="Folder or URL of a store, a Megatron prefix, or the name of synthetic data."),
    ],
    *,
    split: Split = "train",
    seq_len: Annotated[int, Option(help="Number of tokens of a sequence, for the packing table.")] = 2048,
    first: Annotated[int, Option(help="Number of documents whose beginning is shown as text.")] = 3,
    generation: Generation = None,
    as_json: AsJson = False,
) -> None:
    """Show the shards, lengths, packing and texts of a store."""
    inspection = batchloom.inspect(path, split=split, seq_len=seq_len, first=first, generation=generation)
    report(inspection, _iter_lines(inspection, path, generation), as_json=as_json)


def _iter_lines(inspection: Inspection, path: str, generation: int | None) -> Iterator[Line]:
    yield from _iter_count_lines(inspection)
    yield from _list_missed_shares(path, generation)
    if inspection.objective:
        objective = OBJECTIVES[inspection.objective]
        yield f"{objective.trainers} read it with {objective.reader}"
    else:
        yield from _iter_packing_lines(inspection)
    # A generation without its own page uses that of the last one that has it.
    numbers = range(inspection.generation or 1, 0, -1)
    pages = (Path(path) / format_generation_file_name(PAGE_NAME, number) for number in numbers)
    if page := next((candidate for candidate in pages if candidate.is_file()), None):
        yield f"report: {page}"
    for number, text in enumerate(inspection.first):
        yield f"document {number} begins {text!r}"


def _iter_count_lines(inspection: Inspection) -> Iterator[str]:
    split = f" [{inspection.split}]" if inspection.split else ""
    documents = format_count(inspection.documents, "document")
    shards = format_count(inspection.shards, "shard")
    yield f"{inspection.path}{split}: {documents}, {inspection.tokens:,} tokens ({inspection.dtype}) in {shards}"
    if inspection.generation is not None and inspection.generation > 1:
        yield f"generation {inspection.generation} (batchloom log {inspection.path} lists all)"
    if inspection.removed:
        yield (
            f"{format_count(inspection.removed, 'document')} of these removed: read as end tokens that are not "
            "trained, until batchloom compact"
        )
    if inspection.objective:
        objective = OBJECTIVES[inspection.objective]
        sides = (f"{count:,}" if objective.carries else f"{count:,} {side}" for side, count in inspection.sides.items())
        yield f"{objective.contents}: {', '.join(sides)}"
    for kind, media_count in inspection.media.items():
        each = "video frame" if kind == "video" else kind
        share = media_count.tokens / inspection.tokens
        yield (
            f"{format_count(media_count.media, each)} in {format_count(media_count.documents, 'document')}: "
            f"{media_count.tokens:,} tokens, {share:.1%} of all ({inspection.processor})"
        )
    yield (
        f"lengths in tokens: shortest {inspection.shortest:,}, median {inspection.median:,.0f}, mean "
        f"{inspection.mean:,.1f}, longest {inspection.longest:,}"
    )
    if weights := inspection.loss_weights:
        trained = sum(weights.values())
        mean = sum(weight * count for weight, count in weights.items()) / trained
        shares = format_list([f"{weight:g} ({n / trained:.1%})" for weight, n in weights.items()], _MAX_WEIGHTS)
        yield f"loss weights of the first {trained:,} trained tokens: mean {mean:.3g}; {shares}"
    most = max(count for _, _, count in inspection.histogram)
    for low, below, count in inspection.histogram:
        yield f"{low:>10,} - {below - 1:<10,} {count:>12,} {'#' * round(_BAR_WIDTH * count / most)}"


def _list_missed_shares(path: str, generation: int | None) -> list[str]:
    """Describe the subsets of a local store that miss their share of the tokens."""
    if not (Path(path) / MANIFEST_NAME).is_file():
        return []
    manifest = read_manifest(Path(path), generation)
    subsets = manifest.subsets.values()
    recipe = manifest.recipe
    return describe_missed_shares(
        {name: recipe.get(f"{name}_fraction") or 0.0 for name in ("val", "test")},
        {name: subset.remaining_counts[1] for name, subset in manifest.subsets.items()},
        sum(subset.remaining_counts[0] for subset in subsets),
        balance=bool(recipe.get("balance_subsets")),
        texts="reading" in recipe,
        splits=any(source.kind in ("text", "code") for source in manifest.sources),
    )


def _iter_packing_lines(inspection: Inspection) -> Iterator[Line]:
    names = ("packing", "sequences", "filled", "documents cut")
    rows = [
        (row.packing, f"{'' if row.exact else 'about '}{row.sequences:,}", f"{row.fill:.3%}", f"{row.cut:.2%}")
        for row in inspection.efficiencies
    ]
    title = f"packing at seq_len {inspection.seq_len:,}, overlong={inspection.overlong!r}"
    yield make_table(names, rows, numbers=names[1:], title=title, framed=True)
    dropped = inspection.left_out["drop"]
    truncated = inspection.left_out["truncate"]
    if not dropped.documents:
        yield f"no document is longer than {inspection.seq_len:,} tokens"
        return
    default = {inspection.overlong: " (the default here)"}
    longer = "document is" if dropped.documents == 1 else "documents are"
    if inspection.media:
        yield (
            f"{dropped.documents:,} {longer} longer than {inspection.seq_len:,} tokens and left out, with "
            f"{dropped.tokens:,} tokens: of data with images or audio nothing is cut; a larger seq_len keeps them"
        )
        return
    yield (
        f"{dropped.documents:,} {longer} longer than {inspection.seq_len:,} tokens: overlong='split'"
        f"{default.get('split', '')} cuts, 'drop'{default.get('drop', '')} leaves out their {dropped.tokens:,} tokens, "
        f"'truncate' the last {truncated.tokens:,} of those"
    )
