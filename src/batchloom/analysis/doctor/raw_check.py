"""``check`` of raw input: every record is read as by ``prepare``."""

from batchloom.analysis.doctor.examination import Examination
from batchloom.core.addresses import format_input_label, is_url_or_stdin
from batchloom.core.wording import format_count, format_list
from batchloom.preparation import ReadRecipe, Recipe
from batchloom.preparation.request import list_inputs, resolve_inputs
from batchloom.sources.files import Spool
from batchloom.store.maintain import VerificationResult


def check_raw(location: str, text_field: str | None) -> VerificationResult:
    """Read every record of raw input, as ``doctor --full`` does, without a tokenizer."""
    resolved_inputs = resolve_inputs(location, ReadRecipe(text_field=text_field), None)
    recipe = Recipe(
        inputs=resolved_inputs.inputs,
        sources=resolved_inputs.sources,
        reading=resolved_inputs.reading,
        follow_links=resolved_inputs.follow_links,
    )
    verdict = VerificationResult(format_input_label(location) if is_url_or_stdin(location) else location, "file")
    with Spool() as spool:
        listing = list_inputs(recipe, spool)
        examination = Examination(recipe, listing, full=True)
        duplicates = examination.read()
    for number, note in enumerate((*resolved_inputs.notes, *listing.notes), 1):
        verdict.facts["note" if number == 1 else f"note {number}"] = note
    groups = examination.groups
    for group in groups:
        if group.record_parser and group.record_parser.detected:
            names = format_list([source.name for source in group.sources], 1)
            verdict.facts[f"detected in {names}"] = group.record_parser.detected
    records, documents = sum(group.records for group in groups), sum(group.documents for group in groups)
    empty, bad = sum(group.empty for group in groups), sum(group.bad for group in groups)
    verdict.facts["files"] = len(listing.sources)
    verdict.facts["records"] = f"{records:,} ({documents:,} documents, {empty:,} empty, {bad:,} bad)"
    if duplicates.repeated:
        repeated = format_count(duplicates.repeated, "document")
        verdict.facts["duplicates"] = f"{repeated} seen before: prepare leaves them out (--no-dedup keeps them)"
    verdict.faults = [*examination.faults, *(facts.sentence for facts in examination.bad)]
    if bad > len(examination.bad):
        verdict.faults.append(f"{verdict.path}: and {bad - len(examination.bad):,} more bad records.")
    if not documents:
        verdict.faults.append(f"{verdict.path}: holds no document.")
    verdict.sample = examination.beginning
    verdict.used = (
        f"batchloom prepare {verdict.path} --out STORE reads {format_count(documents, 'document')} of it"
        if documents
        else "nothing"
    )
    return verdict
