"""The ``doctor`` command: facts about inputs and the commands that prepare them."""

import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from batchloom.analysis.doctor.estimates import FeedEstimate, PackingFacts, estimate_feeds, estimate_packing
from batchloom.analysis.doctor.examination import examine_inputs
from batchloom.analysis.doctor.findings import BadFacts, DuplicateFacts, ExaminationResult, SourceFacts, TokenizerFacts
from batchloom.analysis.doctor.preview import DocumentPreview, split_preview_segments
from batchloom.analysis.inspection import Inspection, inspect
from batchloom.analysis.path_check import check
from batchloom.core.addresses import has_wildcard, is_url, redact_url as address
from batchloom.core.errors import BatchloomError, InputError, NoRangesError, StoreError, StoreMissingError
from batchloom.core.settings import as_int, quote_value, raise_problems, to_plain
from batchloom.core.wording import format_count
from batchloom.plan import PlanSpec
from batchloom.preparation import ChatRecipe, Note, Progress, ReadRecipe, Recipe
from batchloom.preparation.documents import TEMPLATED_KINDS
from batchloom.preparation.request import InputArgument, as_input_tuple, default_dedup, input_name, resolve_inputs
from batchloom.preparation.settings import (
    DocumentOptions,
    OverlongPolicy,
    check_option_names,
    describe_unused_weights,
    parse_media,
    parse_names,
)
from batchloom.store import MANIFEST_NAME, open_store
from batchloom.store.read import open_remote_manifest

_FLAT_SUFFIXES, _NPY_MAGIC = (".bin", ".npy"), b"\x93NUMPY"
_MAX_CHECKED_IDS = 8192

_DEFAULT_OUT = "store"

# Available everywhere, unlike prepare's default, since it is trained on the input.
_FALLBACK_TOKENIZER = "train:8192"


@dataclass(frozen=True, slots=True)
class PreparedFacts:
    """A store, a Megatron prefix, or a flat file of ids.

    Attributes:
        path: path or URL, as it was given.
        kind: ``store``, ``prefix`` or ``ids``.
        inspection: result of :func:`batchloom.inspect`; None if it cannot be opened, and for a flat
            file, which does not record document boundaries.
        checked: whether every byte was verified (``full``).
        faults: errors found in it.
        preview: the first documents of a store; empty for a prefix, which does not name its tokenizer.
    """

    path: str
    kind: str
    inspection: Inspection | None
    checked: bool
    faults: tuple[str, ...]
    preview: tuple[DocumentPreview, ...]


def detect_prepared_kind(location: str) -> str:
    """Return ``store`` (also at a URL), ``prefix``, ``ids``, or an empty string."""
    if is_url(location):
        return "store" if _is_remote_store(location) else ""
    path = Path(os.path.expanduser(location))  # noqa: PTH111 - Path.expanduser raises for ~nobody
    if (path / MANIFEST_NAME).is_file():
        return "store"
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if stem.name and not path.is_dir() and stem.with_name(f"{stem.name}.idx").is_file():
        return "prefix"
    if path.suffix in _FLAT_SUFFIXES and path.is_file():
        with path.open("rb") as file:
            start = file.read(_MAX_CHECKED_IDS)
        # A text file may have the same suffix; binary ids contain zero bytes, since their high bytes are mostly zero.
        return "ids" if start.startswith(_NPY_MAGIC) or b"\0" in start else ""
    return ""


def _is_remote_store(url: str) -> bool:
    """Return whether a URL is a store.

    A path with a suffix is a file. An unreachable server is reported when the input is read.
    """
    if has_wildcard(url) or Path(address(url)).suffix:
        return False
    try:
        open_remote_manifest(url)
    except StoreMissingError:
        return False
    except (StoreError, NoRangesError):
        return True  # It is damaged, or its server lacks range requests; opening it reports the error.
    except InputError:
        return False
    return True


def examine_prepared(location: str, seq_len: int, preview: int, *, full: bool) -> PreparedFacts:
    """Open a store or prefix; with ``full``, verify it."""
    kind = detect_prepared_kind(location)
    expanded_location = location if is_url(location) else os.path.expanduser(location)  # noqa: PTH111
    faults: list[str] = []
    inspection: Inspection | None = None
    previews: tuple[DocumentPreview, ...] = ()
    try:
        if kind != "ids":
            inspection = inspect(expanded_location, seq_len=seq_len, first=0)
            faults += check(expanded_location).faults if full else []
        if kind == "store":
            previews = _preview_store(expanded_location, preview)
    except BatchloomError as error:
        faults.append(str(error))
    return PreparedFacts(location, kind, inspection, full and kind != "ids", tuple(faults), previews)


def _preview_store(location: str, count: int) -> tuple[DocumentPreview, ...]:
    store = open_store(location)
    previews = []
    for number in store.contents.list_first(count):
        ids = store[number].ids.astype(np.int64)
        span = (np.array([number]), np.zeros(1, np.int64), np.array([ids.size]))
        trained = store.mask(*span)[0] if store.masked else np.ones(ids.size, bool)
        origin, segments = (
            store.provenance.of(number),
            tuple(split_preview_segments(store.tokenizer, ids, trained)),
        )
        row = None if origin.line else origin.record + 1
        previews.append(DocumentPreview(origin.source, origin.line, row, ids.size, int(trained.sum()), segments))
    return tuple(previews)


def quote_for_shell(word: str) -> str:
    r"""Quote a word for a shell; unprintable characters are escaped: ``$'a\x1bb'``."""
    if word.isprintable():
        return shlex.quote(word)
    plain = os.fsencode(word)
    spelled = "".join(chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}" for byte in plain)
    return f"$'{spelled}'"


def make_prepare_commands(
    recipe: Recipe, tokenizer: str, inputs: Sequence[str], sources: Sequence[SourceFacts]
) -> list[str]:
    """Return the prepare commands: one, or one per distinct ``--map``.

    ``inputs`` holds names for the command line; an input that cannot be named there has an empty name.
    """
    if not all(inputs):
        return []
    suggested = {source.suggestion for source in sources if source.suggestion}
    refused = [source for source in sources if source.fault and not source.suggestion]
    if not suggested:
        return [_make_prepare_command(recipe, tokenizer, inputs, "")]
    if len(suggested) == 1 and not refused and all(source.suggestion for source in sources):
        return [_make_prepare_command(recipe, tokenizer, inputs, suggested.pop())]
    by_map: dict[str, list[str]] = {}
    for source in sources:
        if source not in refused:
            by_map.setdefault(source.suggestion or "", []).append(source.path)
    return [
        _make_prepare_command(recipe, tokenizer, paths, mapping, number)
        for number, (mapping, paths) in enumerate(by_map.items(), 1)
    ]


def _make_prepare_command(
    recipe: Recipe, tokenizer: str, inputs: Iterable[str], suggestion: str, number: int = 0
) -> str:
    words = [
        "batchloom",
        "prepare",
        *inputs,
        "--out",
        _choose_out_folder(number),
        "--tokenizer",
        tokenizer,
    ]
    mapping = suggestion or ",".join(f"{role}={column}" for role, column in recipe.reading.mapping.items())
    if mapping:
        words += ["--map", mapping]
    if recipe.reading.ignore:
        words += ["--ignore", ",".join(recipe.reading.ignore)]
    if (media := recipe.reading.media) is not None:
        words += ["--processor", media.processor]
        words += ["--data-folder", media.data_folder] if media.data_folder is not None else []
        words += ["--media", media.keep] if media.keep != "reference" else []
    for spec, names in (
        (recipe, ("end_token", "max_bad")),
        (recipe.reading, ("text_field", "split_on")),
        (recipe.chat, ("template", "train_on", "max_tokens", "overlong")),
    ):
        for name in names:
            value = getattr(spec, name)
            if value != _get_default(spec, name):
                words += [f"--{name.replace('_', '-')}", _format_setting(name, value)]
    if recipe.follow_links:
        words.append("--follow-links")
    if not recipe.reading.normalize:
        words.append("--no-normalize")
    return " ".join(map(quote_for_shell, words))


def _format_setting(name: str, value: object) -> str:
    r"""Format a value for the command line: a newline in a marker as ``\n``."""
    text = str(value)
    return text.replace("\n", "\\n").replace("\t", "\\t") if name == "split_on" else text


def _get_default(spec: Recipe | ReadRecipe | ChatRecipe, name: str) -> object:
    default = next(field.default for field in fields(spec) if field.name == name)
    return None if default is MISSING else default


def _choose_out_folder(number: int) -> str:
    """Return the name of a folder that does not exist yet."""
    name, count = f"{_DEFAULT_OUT}-{number}" if number else _DEFAULT_OUT, 2
    folder = name
    while os.path.lexists(folder):
        folder, count = f"{name}-{count}", count + 1
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Result of :func:`doctor`. Counts are estimates if ``exact`` is False.

    Attributes:
        inputs: inputs as they were given, URLs without credentials.
        exact: whether everything was read; otherwise a sample.
        files, bytes: number of files and bytes of the complete input, without prepared inputs.
        read_bytes: number of those bytes that were read.
        sources: one entry per source; with more than 20, one per group that is read alike.
        prepared: stores and prefixes among the inputs.
        tokenizer: the tokenizer; None without one.
        documents: number of documents in all sources.
        tokens: number of their tokens; None without a tokenizer.
        trained_tokens: number of trained tokens; None without a tokenizer.
        duplicates: repeated documents; None if there is nothing to read.
        bad: the first ten bad records.
        bad_seen: number of bad records that were read.
        packing: how full sequences are; None without a tokenizer or documents.
        seconds: estimated time of ``prepare`` on this machine; None without a tokenizer.
        store_bytes: estimated size of the store; None without a tokenizer.
        ways: resources of a run on prepared data and on streamed data; empty if the resulting documents
            are unknown.
        faults: errors in the input; empty if it is sound.
        warnings: warnings for the user.
        notes: omitted inputs, and how inputs were interpreted.
        commands: command lines that prepare the input, quoted for a shell; empty if something must be fixed first.
    """

    inputs: tuple[str, ...]
    exact: bool = True
    files: int = 0
    bytes: int = 0
    read_bytes: int = 0
    sources: tuple[SourceFacts, ...] = ()
    prepared: tuple[PreparedFacts, ...] = ()
    tokenizer: TokenizerFacts | None = None
    documents: int = 0
    tokens: int | None = None
    trained_tokens: int | None = None
    duplicates: DuplicateFacts | None = None
    bad: tuple[BadFacts, ...] = ()
    bad_seen: int = 0
    packing: PackingFacts | None = None
    seconds: float | None = None
    store_bytes: int | None = None
    ways: tuple[FeedEstimate, ...] = ()
    faults: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """True if there are no faults."""
        return not self.faults

    def plain(self) -> dict[str, Any]:
        """Return all fields and ``sound`` as plain JSON values."""
        return {"sound": self.sound, **to_plain(self)}


def doctor(
    inputs: InputArgument | Sequence[InputArgument],
    *,
    overlong: OverlongPolicy = "drop",
    seq_len: int = 2048,
    global_batch_size: int | None = None,
    full: bool = False,
    preview: int = 2,
    progress: Callable[[Note | Progress], None] | None = None,
    **options: Unpack[DocumentOptions],
) -> Diagnosis:
    """Examine inputs before preparation: contents, faults and estimates.

    Nothing is written. Inputs of up to 16 MiB are read completely. Larger ones are sampled over all
    of their bytes, within seconds and bounded memory.

    Args:
        inputs: inputs as for :func:`batchloom.prepare`; also stores and Megatron prefixes.
        overlong: policy for conversations longer than ``max_tokens``.
        seq_len: tokens of a sequence, for the packing estimate.
        global_batch_size: sequences of a step, for the steps of an epoch; None to leave them out.
        full: whether to read everything, whatever its size.
        preview: number of documents to preview per source.
        progress: callback that receives a :class:`Progress` several times a second.
        **options: settings of the documents, as ``prepare`` takes them. Without a ``tokenizer``, the default of
            ``prepare`` is used if it is available.

    Raises:
        SettingsError: settings are unknown or contradict each other.
        InputMissingError, InputError: an input does not exist, holds nothing usable, or cannot be listed.
        TokenizerError: the given tokenizer is not available.
    """
    arguments = as_input_tuple(inputs)
    prepared_inputs = [
        argument for argument in arguments if isinstance(argument, str) and detect_prepared_kind(argument)
    ]
    raw_inputs = [argument for argument in arguments if argument not in prepared_inputs]
    check_option_names("doctor", options, DocumentOptions)
    given = {name: value for name, value in options.items() if value is not None}
    reading, tokenizer = _make_read_recipe(given), options.get("tokenizer")
    resolved_inputs = resolve_inputs(raw_inputs or arguments, reading, tokenizer)
    chat_names = ("template", "train_on", "max_tokens")
    recipe = Recipe(
        inputs=resolved_inputs.inputs,
        sources=resolved_inputs.sources,
        tokenizer=resolved_inputs.tokenizer,
        reading=resolved_inputs.reading,
        follow_links=bool(options.get("follow_links")) or resolved_inputs.follow_links,
        dedup=default_dedup(reading)[0],
        chat=ChatRecipe(overlong=overlong, **_select(given, chat_names)),
        **_select(given, ("end_token", "max_bad")),
    )
    _check_sizes(seq_len, global_batch_size, preview)
    prepared = [examine_prepared(argument, seq_len, preview, full=full) for argument in prepared_inputs]
    if not raw_inputs:
        return _diagnose_prepared(recipe.inputs, prepared)
    listener, optional = progress or (lambda _: None), tokenizer is None
    examination = examine_inputs(recipe, listener, full=full, preview=preview, tokenizer_optional=optional)
    packing = _estimate_packing(examination, seq_len, global_batch_size)
    commands = _make_next_commands(
        replace(recipe, reading=reading),
        [input_name(argument) for argument in raw_inputs],
        examination,
    )
    weights = filter(None, [describe_unused_weights(recipe.sources)])
    examination = replace(examination, notes=(*resolved_inputs.notes, *examination.notes, *weights))
    return _make_diagnosis(examination, prepared, packing, commands)


def _make_read_recipe(options: Mapping[str, Any]) -> ReadRecipe:
    return ReadRecipe(
        mapping=dict(options.get("mapping", {})),
        ignore=parse_names(options.get("ignore", ())),
        media=parse_media(options.get("media")),
        **_select(options, ("text_field", "split_on", "normalize")),
    )


def _select(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def _estimate_packing(examination: ExaminationResult, seq_len: int, batch_size: int | None) -> PackingFacts | None:
    """Estimate packing with the loader's default policy for overlong documents."""
    drops = examination.holds_media or {source.way for source in examination.sources if source.way} <= TEMPLATED_KINDS
    return estimate_packing(examination.lengths, examination.weights, seq_len, batch_size, drops=drops)


def _check_sizes(seq_len: int, global_batch_size: int | None, preview: int) -> None:
    batch_size = 1 if global_batch_size is None else global_batch_size
    PlanSpec(seq_len=seq_len, global_batch_size=batch_size)
    preview_count = as_int(preview)
    if preview_count is None or preview_count < 0:
        raise_problems([f"preview: {quote_value(preview)} is not a number of documents"])


def _make_next_commands(recipe: Recipe, names: Sequence[str], examination: ExaminationResult) -> list[str]:
    """Return the prepare commands; none if a fault remains that no ``--map`` fixes."""
    tokenizer = _FALLBACK_TOKENIZER if examination.tokenizer_missing else recipe.tokenizer
    # A wrong mapping in a manifest is fixed in the manifest, not with --map.
    sources = () if recipe.sources else examination.sources
    curable_faults = {source.fault for source in sources if source.fault and source.suggestion}
    if not curable_faults >= {*examination.faults}:
        return []
    return make_prepare_commands(recipe, tokenizer, names, sources)


def _make_diagnosis(
    examination: ExaminationResult,
    prepared: Sequence[PreparedFacts],
    packing: PackingFacts | None,
    commands: Sequence[str],
) -> Diagnosis:
    warnings = list(examination.warnings)
    if packing and packing.longer:
        about = "" if examination.exact else "about "
        longer = format_count(packing.longer, "document")
        kinds = {source.way for source in examination.sources if source.way}
        warnings.append(
            f"{about}{longer} {'is' if packing.longer == 1 else 'are'} longer than seq_len {packing.seq_len:,}: "
            f"{_describe_overlong_handling(kinds, media=examination.holds_media)}"
            f"{'' if packing.sequences else ', and none is left'}."
        )
    if prepared:
        listed = ", ".join(facts.path for facts in prepared)
        warnings.append(f"Already prepared, so not an input of prepare: {listed}.")
    tokens = [source.total_tokens for source in examination.sources if source.total_tokens is not None]
    trained = [source.trained_tokens for source in examination.sources if source.trained_tokens is not None]
    return Diagnosis(
        inputs=examination.inputs,
        exact=examination.exact,
        files=examination.files,
        bytes=examination.bytes,
        read_bytes=examination.read_bytes,
        sources=examination.sources,
        prepared=tuple(prepared),
        tokenizer=examination.tokenizer,
        documents=sum(source.documents for source in examination.sources),
        tokens=sum(tokens) if examination.tokenizer else None,
        trained_tokens=sum(trained) if examination.tokenizer else None,
        duplicates=examination.duplicates,
        bad=examination.bad,
        bad_seen=examination.bad_seen,
        packing=packing,
        seconds=examination.seconds,
        store_bytes=examination.store_bytes,
        ways=estimate_feeds(examination, packing),
        faults=examination.faults + tuple(fault for facts in prepared for fault in facts.faults),
        warnings=tuple(warnings),
        notes=examination.notes,
        commands=(*commands, *_list_usage_commands(prepared)),
    )


def _describe_overlong_handling(record_kinds: set[str], *, media: bool) -> str:
    """Describe the default handling of documents longer than a sequence."""
    if media:
        return "a loader leaves them out (overlong='drop'), as it does for all data with images or audio"
    if record_kinds <= TEMPLATED_KINDS:
        return "a loader leaves conversations out (overlong='drop')"
    if record_kinds & TEMPLATED_KINDS:
        return (
            "a loader cuts them, and also conversations in data that holds texts too (overlong='split'); "
            "overlong='drop' leaves all of them out"
        )
    return "a loader cuts them (overlong='split')"


def _diagnose_prepared(inputs: Sequence[str], prepared: Sequence[PreparedFacts]) -> Diagnosis:
    """Return the diagnosis if all inputs are prepared, so nothing is read."""
    inspections = [facts.inspection for facts in prepared if facts.inspection]
    return Diagnosis(
        inputs=tuple(map(input_name, inputs)),
        prepared=tuple(prepared),
        documents=sum(inspection.documents for inspection in inspections),
        tokens=sum(inspection.tokens for inspection in inspections),
        faults=tuple(fault for facts in prepared for fault in facts.faults),
        notes=tuple(note for facts in prepared if (note := _describe_prepared(facts))),
        commands=_list_usage_commands(prepared),
    )


def _describe_prepared(prepared: PreparedFacts) -> str:
    if prepared.kind == "ids":
        return (
            f"{prepared.path} holds bare ids: import needs --dtype, the end of documents (--eod or "
            "--document-tokens), which the file may not record, and --tokenizer or --vocab-size."
        )
    if kind := _describe_preferences(prepared):
        return (
            f"{prepared.path} holds preferences ({kind}): preference trainers read it with "
            "batchloom.store.PreferencePairs, and batchloom train rejects it."
        )
    if _describe_processor(prepared):
        return (
            f"{prepared.path} holds documents of a {_describe_processor(prepared)}: FOLDER is the folder of a model "
            "for that processor (docs/media.md)."
        )
    return ""


def _list_usage_commands(prepared: Sequence[PreparedFacts]) -> tuple[str, ...]:
    """List the next command per prepared input: import for ids, otherwise train."""
    return tuple(
        _make_usage_command(facts) for facts in prepared if not facts.faults and not _describe_preferences(facts)
    )


def _describe_preferences(prepared: PreparedFacts) -> str:
    return prepared.inspection.preferences if prepared.inspection else ""


def _describe_processor(prepared: PreparedFacts) -> str:
    return prepared.inspection.processor if prepared.inspection else ""


def _make_usage_command(prepared: PreparedFacts) -> str:
    path = prepared.path
    if prepared.kind == "ids":
        import_options = "--dtype DTYPE --eod ID --tokenizer TOKENIZER"
        return f"batchloom import {quote_for_shell(path)} --out {quote_for_shell(path + '-store')} {import_options}"
    stem = path.removesuffix(".bin").removesuffix(".idx") if prepared.kind == "prefix" else path
    init = " --init FOLDER" if _describe_processor(prepared) else ""
    return f"batchloom train --data {quote_for_shell(stem)}{init} --out run"
