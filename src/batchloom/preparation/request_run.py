"""Run of a request into a local folder or a URL: list the inputs, make the store."""

from dataclasses import replace
from pathlib import Path

from batchloom.core.addresses import is_url
from batchloom.core.errors import InputError, InputMissingError, SettingsError
from batchloom.core.files import refuse_url
from batchloom.core.process_state import pause_gc, relax_gc
from batchloom.core.settings import quote_value
from batchloom.preparation.input_jobs import make_store
from batchloom.preparation.listing.input_listing import list_inputs
from batchloom.preparation.output_checks import check_output_folder, check_separate
from batchloom.preparation.report.progress import Listener, Note, PrepareLog, PrepareResult
from batchloom.preparation.report.report import read_report
from batchloom.preparation.request.recipe_choice import PrepareRequest, describe_remade_store
from batchloom.preparation.rerun import previous_detections
from batchloom.preparation.settings.recipe import Recipe
from batchloom.preparation.settings.run_settings import RunSettings
from batchloom.preparation.synthetic_request import parse_synthetic_input
from batchloom.preparation.synthetic_run import write_synthetic
from batchloom.preparation.units.work_folder import SPOOL_NAME
from batchloom.sources.files import Spool
from batchloom.store import MANIFEST_NAME, WORK_NAME, wrap_write_errors


@relax_gc()
def run_request(request: PrepareRequest, out: str, listener: Listener, settings: RunSettings) -> PrepareResult:
    """Run a request into a local folder or a URL; see :func:`prepare`.

    When a store is made again, a note says whether the result is the same.
    """
    if is_url(out):
        if settings.append:
            raise SettingsError(
                [f"append: {quote_value(out)} is remote, and only a store on this machine can be appended to"]
            )
        if request.partial:
            raise InputError(request.partial)
        from batchloom.preparation.remote_prepare import run_remote

        return run_remote(request, out, listener, settings)
    refuse_url(out, "The output", may_be_remote=True)
    if settings.work is not None:
        raise SettingsError(
            [f"work: {quote_value(str(settings.work))} applies to a remote store only (--out s3://...); leave it out"]
        )
    if request.partial and not settings.append:
        raise InputError(request.partial)
    result = run_recipe(request.recipe, Path(out), listener, request=request, settings=settings)
    # A dry run leaves no store to compare.
    note = "" if settings.dry_run else describe_remade_store(Path(out), request.store)
    if not note:
        return result
    listener(Note(note))
    return replace(result, notes=(*result.notes, note))


def run_recipe(
    recipe: Recipe,
    out: Path,
    listener: Listener,
    *,
    request: PrepareRequest | None = None,
    settings: RunSettings | None = None,
) -> PrepareResult:
    """Run a recipe into ``out``; see :func:`prepare`.

    Args:
        recipe: the recipe.
        out: folder of the store.
        listener: callback that gets notes and progress.
        request: origin of the recipe: its notes, and the tokenizer that a store holds.
        settings: settings of the run.
    """
    settings = settings or RunSettings()
    log = PrepareLog(listener)
    request = PrepareRequest(recipe) if request is None else replace(request, recipe=recipe)
    if synthetic_spec := parse_synthetic_input(recipe.inputs):
        return write_synthetic(synthetic_spec, recipe, out, listener)
    check_separate(recipe.inputs, out)
    with wrap_write_errors(out):
        has_store = (out / MANIFEST_NAME).exists()
    if not has_store:
        # The spool below creates files in this folder.
        check_output_folder(out)
    with Spool(out / WORK_NAME / SPOOL_NAME) as spool:
        with pause_gc():
            report = read_report(out)
            # A file may have another format now, with the same size and time.
            detected_files = {} if settings.hash_inputs else previous_detections(report, recipe)
            try:
                listing = list_inputs(
                    recipe, spool, exclude=out, streaming=settings.streaming, detected_files=detected_files
                )
            except InputMissingError as error:
                if request.kept_patterns and request.kept_patterns in str(error):
                    raise InputMissingError(
                        f"{error} {request.kept_patterns} is a setting of {out}; give another one to replace it."
                    ) from error
                raise
        listing = request.add_notes(listing)
        return make_store(request, out, listing, spool, settings, log, report)
