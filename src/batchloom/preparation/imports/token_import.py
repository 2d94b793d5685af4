"""``import``: build a store from existing token id files."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from batchloom.core.errors import InputError, TokenizerError
from batchloom.preparation.imports.import_run import ImportRun
from batchloom.preparation.imports.import_spec import ImportInputs, ImportSpec, import_spec_to_plain
from batchloom.preparation.imports.token_files import TokenInput, find_token_inputs, make_reported_sources
from batchloom.preparation.keywords import ImportOptions
from batchloom.preparation.plain_store import PlainStoreJob, list_plain_differences
from batchloom.preparation.report.progress import Listener, PrepareResult, log_note
from batchloom.preparation.report.report import read_report
from batchloom.preparation.resumable_job import run_job
from batchloom.preparation.settings.recipe import as_recipe_inputs, check_option_names
from batchloom.preparation.units.work_folder import WORK_VERSION, JobIdentity
from batchloom.store import Manifest
from batchloom.tokens import Tokenizer, parse_train_spec, resolve_tokenizer


def import_tokens(
    inputs: ImportInputs,
    *,
    out: str | os.PathLike[str],
    val: ImportInputs = (),
    progress: Listener | None = None,
    **options: Unpack[ImportOptions],
) -> PrepareResult:
    """Build a store from files of token ids; linked files stay where they are.

    Every id is read once, in bounded memory, and checked against the vocabulary. On a finished
    store the same arguments succeed at once.

    Args:
        inputs: Megatron prefixes, flat files of ids, ``.npy`` files, and folders of prefixes.
        out: the store's folder.
        val: inputs of the subset ``val``.
        progress: called with each Note or Progress; without it, notes go to the log ``batchloom``.
        **options: settings, which :class:`ImportSpec` documents.

    Raises:
        SettingsError: settings contradict each other.
        InputMissingError: an input does not exist or is empty.
        InputError: ids outside the vocabulary, a dtype that disagrees, or a file that must be copied.
        StoreError: a prefix is damaged.
        TokenizerError: the tokenizer cannot be found, read or trusted.
        StoreConflictError: ``out`` holds the output of another job.
        OutputError: ``out`` cannot be written, or a file cannot be linked into it.
    """
    check_option_names("import_tokens", options, ImportOptions)
    spec = ImportSpec(inputs=as_recipe_inputs(inputs), val=as_recipe_inputs(val), **options)
    return run_import(spec, Path(out), progress or log_note)


def run_import(spec: ImportSpec, out: Path, listener: Listener) -> PrepareResult:
    """Run an import into ``out``; see :func:`import_tokens`."""
    token_inputs = find_token_inputs([*spec.inputs, *spec.val])
    first_val = len(find_token_inputs(spec.inputs))
    _check_no_repeats(token_inputs)
    tokenizer = _resolve_import_tokenizer(spec)
    plain = import_spec_to_plain(spec)
    run = ImportRun(spec, token_inputs, first_val, tokenizer, listener)
    sources = [(token_input.name, token_input.size, token_input.mtime_ns) for token_input in token_inputs]

    def list_differences(manifest: Manifest) -> list[str]:
        differences = list_plain_differences(manifest, plain)
        report = read_report(out)
        if report is None or report.sources != make_reported_sources(token_inputs):
            differences.append("inputs: other files, or files that were written again")
        if tokenizer is not None and tokenizer.fingerprint != manifest.tokenizer.fingerprint:
            differences.append(f"tokenizer: {spec.tokenizer} has changed")
        return differences

    job = PlainStoreJob(out, JobIdentity(WORK_VERSION, plain, [], sources), list_differences, run.make)
    return replace(run_job(job, out), notes=tuple(run.notes))


def _resolve_import_tokenizer(spec: ImportSpec) -> Tokenizer | None:
    if spec.tokenizer is None:
        return None
    if parse_train_spec(spec.tokenizer) is not None:
        raise TokenizerError(
            f"{spec.tokenizer} would train a tokenizer on texts, and the inputs hold ids: name the tokenizer that "
            "made them, or give --vocab-size"
        )
    return resolve_tokenizer(spec.tokenizer, end_token=spec.end_token)


def _check_no_repeats(token_inputs: Sequence[TokenInput]) -> None:
    names_by_path: dict[Path, str] = {}
    for token_input in token_inputs:
        path = token_input.path.resolve()
        if path in names_by_path:
            raise InputError(
                f"{token_input.name} and {names_by_path[path]} are the same file; name each file once, for one subset."
            )
        names_by_path[path] = token_input.name
