"""The ``doctor`` command: facts about inputs and the commands that prepare them."""

import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from itertools import chain, count
from typing import Any, Unpack

import numpy as np

from batchloom.analysis.doctor.estimates import estimate_feeds, estimate_packing
from batchloom.analysis.doctor.examination import ExaminationResult, examine_inputs
from batchloom.analysis.doctor.findings import Diagnosis, PreparedFacts
from batchloom.analysis.doctor.path_check import check, detect_prepared_kind
from batchloom.analysis.doctor.preview import DocumentPreview, make_preview
from batchloom.analysis.inspection import Inspection, inspect
from batchloom.core.addresses import is_url
from batchloom.core.errors import BatchloomError, SettingsError
from batchloom.core.settings import as_int, quote_value
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
from batchloom.store import open_store

_DEFAULT_OUT = "store"

# Available everywhere, unlike prepare's default, since it is trained on the input.
_FALLBACK_TOKENIZER = "train:8192"


def _examine_prepared(location: str, seq_len: int, preview: int, *, full: bool) -> PreparedFacts:
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


def _preview_store(location: str, most: int) -> tuple[DocumentPreview, ...]:
    store = open_store(location)
    previews = []
    for number in store.contents.list_first(most):
        ids = store[number].ids.astype(np.int64)
        span = (np.array([number]), np.zeros(1, np.int64), np.array([ids.size]))
        trained = store.mask(*span)[0] if store.masked else np.ones(ids.size, bool)
        origin = store.provenance.of(number)
        row = None if origin.line else origin.record + 1
        previews.append(make_preview(store.tokenizer, origin.source, (origin.line, row), ids, trained))
    return tuple(previews)


def quote_for_shell(word: str) -> str:
    r"""Quote a word for a shell; unprintable characters are escaped: ``$'a\x1bb'``."""
    if word.isprintable():
        return shlex.quote(word)
    plain = os.fsencode(word)
    spelled = "".join(chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}" for byte in plain)
    return f"$'{spelled}'"


def _make_prepare_commands(recipe: Recipe, names: Sequence[str], examination: ExaminationResult) -> list[str]:
    """Return the prepare commands: one, or one per distinct ``--map``.

    Empty if an input cannot be named on a command line, or if a fault remains that no ``--map`` fixes. A wrong mapping
    in a manifest is fixed in the manifest.
    """
    sources = () if recipe.sources else examination.diagnosis.sources
    suggested = {source.suggestion for source in sources if source.suggestion}
    refused = [source for source in sources if source.fault and not source.suggestion]
    curable_faults = {source.fault for source in sources if source.fault and source.suggestion}
    if not all(names) or not curable_faults >= {*examination.diagnosis.faults}:
        return []
    if examination.tokenizer_missing:
        recipe = replace(recipe, tokenizer=_FALLBACK_TOKENIZER)
    if not suggested:
        return [_make_prepare_command(recipe, names, "")]
    if len(suggested) == 1 and not refused and all(source.suggestion for source in sources):
        return [_make_prepare_command(recipe, names, suggested.pop())]
    by_map: dict[str, list[str]] = {}
    for source in sources:
        if source not in refused:
            by_map.setdefault(source.suggestion or "", []).append(source.path)
    return [
        _make_prepare_command(recipe, paths, mapping, f"-{number}")
        for number, (mapping, paths) in enumerate(by_map.items(), 1)
    ]


def _make_prepare_command(recipe: Recipe, inputs: Iterable[str], suggestion: str, suffix: str = "") -> str:
    words = ["batchloom", "prepare", *inputs, "--out", _choose_out_folder(_DEFAULT_OUT + suffix)]
    words += ["--tokenizer", recipe.tokenizer]
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
        defaults = {field.name: None if field.default is MISSING else field.default for field in fields(spec)}
        for name in names:
            value = getattr(spec, name)
            if value != defaults[name]:
                text = str(value)
                if name == "split_on":
                    text = text.replace("\n", "\\n").replace("\t", "\\t")
                words += [f"--{name.replace('_', '-')}", text]
    if recipe.follow_links:
        words.append("--follow-links")
    if not recipe.reading.normalize:
        words.append("--no-normalize")
    return " ".join(map(quote_for_shell, words))


def _choose_out_folder(name: str) -> str:
    """Return the name of a folder that does not exist yet."""
    numbered_names = (f"{name}-{number}" for number in count(2))
    return next(folder for folder in chain([name], numbered_names) if not os.path.lexists(folder))


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
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    tokenizer = options.get("tokenizer")
    reading = ReadRecipe(
        mapping=dict(given.get("mapping", {})),
        ignore=parse_names(given.get("ignore", ())),
        media=parse_media(given.get("media")),
        **_select(given, ("text_field", "split_on", "normalize")),
    )
    resolved_inputs = resolve_inputs(raw_inputs or arguments, reading, tokenizer)
    recipe = Recipe(
        inputs=resolved_inputs.inputs,
        sources=resolved_inputs.sources,
        tokenizer=resolved_inputs.tokenizer,
        reading=resolved_inputs.reading,
        follow_links=bool(options.get("follow_links")) or resolved_inputs.follow_links,
        dedup=default_dedup(reading)[0],
        chat=ChatRecipe(overlong=overlong, **_select(given, ("template", "train_on", "max_tokens"))),
        **_select(given, ("end_token", "max_bad")),
    )
    PlanSpec(seq_len=seq_len, global_batch_size=1 if global_batch_size is None else global_batch_size)
    if (as_int(preview) or 0) < 0 or as_int(preview) is None:
        raise SettingsError([f"preview: {quote_value(preview)} is not a number of documents"])
    prepared = tuple(_examine_prepared(argument, seq_len, preview, full=full) for argument in prepared_inputs)
    prepared_faults = tuple(fault for facts in prepared for fault in facts.faults)
    usage_commands = _list_usage_commands(prepared)
    if not raw_inputs:
        inspections = [facts.inspection for facts in prepared if facts.inspection]
        return Diagnosis(
            inputs=tuple(map(input_name, recipe.inputs)),
            prepared=prepared,
            documents=sum(inspection.documents for inspection in inspections),
            tokens=sum(inspection.tokens for inspection in inspections),
            faults=prepared_faults,
            notes=tuple(note for facts in prepared if (note := _describe_prepared(facts))),
            commands=usage_commands,
        )
    listener = progress or (lambda _: None)
    examination = examine_inputs(recipe, listener, full=full, preview=preview, tokenizer_optional=tokenizer is None)
    found = examination.diagnosis
    kinds = {source.way for source in found.sources if source.way}
    media = any(source.media for source in found.sources)
    # A loader's default policy for overlong documents.
    drops = media or kinds <= TEMPLATED_KINDS
    packing = estimate_packing(examination.lengths, examination.weights, seq_len, global_batch_size, drops=drops)
    warnings = list(found.warnings)
    if packing and packing.longer:
        longer = ("" if found.exact else "about ") + format_count(packing.longer, "document")
        warnings.append(
            f"{longer} {'is' if packing.longer == 1 else 'are'} longer than seq_len {packing.seq_len:,}: "
            f"{_describe_overlong_handling(kinds, media=media)}{'' if packing.sequences else ', and none is left'}."
        )
    if prepared:
        listed = ", ".join(facts.path for facts in prepared)
        warnings.append(f"Already prepared, so not an input of prepare: {listed}.")
    names = [input_name(argument) for argument in raw_inputs]
    commands = _make_prepare_commands(replace(recipe, reading=reading), names, examination)
    return replace(
        found,
        prepared=prepared,
        packing=packing,
        ways=estimate_feeds(examination, packing),
        faults=found.faults + prepared_faults,
        warnings=tuple(warnings),
        notes=(*resolved_inputs.notes, *found.notes, *filter(None, [describe_unused_weights(recipe.sources)])),
        commands=(*commands, *usage_commands),
    )


def _select(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


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


def _describe_prepared(prepared: PreparedFacts) -> str:
    if prepared.kind == "ids":
        return (
            f"{prepared.path} holds bare ids: import needs --dtype, the end of documents (--eod or "
            "--document-tokens), which the file may not record, and --tokenizer or --vocab-size."
        )
    if prepared.inspection and prepared.inspection.preferences:
        return (
            f"{prepared.path} holds preferences ({prepared.inspection.preferences}): preference trainers read it with "
            "batchloom.store.PreferencePairs, and batchloom train rejects it."
        )
    if prepared.inspection and prepared.inspection.processor:
        return (
            f"{prepared.path} holds documents of a {prepared.inspection.processor}: FOLDER is the folder of a model "
            "for that processor (docs/media.md)."
        )
    return ""


def _list_usage_commands(prepared: Sequence[PreparedFacts]) -> tuple[str, ...]:
    """List the next command per prepared input: import for ids, otherwise train."""
    commands = []
    for facts in prepared:
        if facts.faults or (facts.inspection and facts.inspection.preferences):
            continue
        path, quoted_path = facts.path, quote_for_shell(facts.path)
        if facts.kind == "ids":
            import_options = "--dtype DTYPE --eod ID --tokenizer TOKENIZER"
            out = quote_for_shell(path + "-store")
            commands.append(f"batchloom import {quoted_path} --out {out} {import_options}")
            continue
        if facts.kind == "prefix":
            quoted_path = quote_for_shell(path.removesuffix(".bin").removesuffix(".idx"))
        init = " --init FOLDER" if facts.inspection and facts.inspection.processor else ""
        commands.append(f"batchloom train --data {quoted_path}{init} --out run")
    return tuple(commands)
