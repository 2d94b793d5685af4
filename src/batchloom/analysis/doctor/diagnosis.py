"""The ``doctor`` command: facts about inputs, and estimates of a run."""

import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from batchloom.analysis.doctor.examination import ExaminationResult, examine_inputs
from batchloom.analysis.doctor.findings import Diagnosis, FeedEstimate, PackingFacts, PreparedFacts, SourceFacts
from batchloom.analysis.doctor.path_check import check, detect_prepared_kind
from batchloom.analysis.doctor.sampling import DocumentPreview, make_preview
from batchloom.analysis.inspection import Inspection, inspect
from batchloom.chat.templates import format_template_argument, parse_template_arguments
from batchloom.core.addresses import is_url
from batchloom.core.errors import BatchloomError, SettingsError
from batchloom.core.settings import as_int, list_settings, quote_value, to_plain
from batchloom.core.wording import format_count
from batchloom.plan import PlanSpec, compute_min_sequences, count_sequences
from batchloom.plan.packing import POOL_SIZE
from batchloom.preparation import (
    ChatRecipe,
    DocumentOptions,
    MediaRecipe,
    Note,
    Progress,
    ReadRecipe,
    Recipe,
    list_import_options,
    make_request,
    parse_clean_steps,
)
from batchloom.preparation.documents import TEMPLATED_KINDS, get_objective
from batchloom.preparation.request import InputArgument, as_input_tuple, default_tokenizer, input_name
from batchloom.preparation.settings import (
    OverlongPolicy,
    check_option_names,
    describe_unused_weights,
    parse_media,
)
from batchloom.sources.formats import WHOLE_KINDS
from batchloom.store import open_store
from batchloom.store.format import OBJECTIVES, UINT16_IDS
from batchloom.streaming import FIRST_POOL, choose_default_lanes, choose_lane_pool_size

_DEFAULT_OUT = "store"

# Available everywhere, unlike prepare's default, since it is trained on the input.
_FALLBACK_TOKENIZER = "train:8192"
_DEFAULT_PACKING = "best_fit"
# Used if no global batch size is given.
_DEFAULT_BATCH_SIZE = 64
# Bytes per read, and the smallest byte range of an input that is read separately.
_CHUNK_BYTES = 512 << 10
_MIN_RANGE_BYTES = 1 << 10
# Measured bytes of a tokenizing worker; bytes of a span in a plan, and the number of pools a plan caches.
_WORKER_BYTES = 160 << 20
_SPAN_BYTES = 48
_CACHED_POOLS = 4
# Batches that are queued or being built: three arrays of 8 bytes per token.
_PREFETCHED_BATCHES = 6
_TOKEN_BYTES = 24
_READY_SECONDS = 2.0
# Percentages of the documents for which a sequence length is proposed, and what it is a multiple of.
_KEPT_SHARES = (95, 99)
_LENGTH_MULTIPLE = 64


def _examine_prepared(location: str, seq_len: int, preview: int, *, full: bool) -> PreparedFacts:
    kind = detect_prepared_kind(location)
    expanded_location = location if is_url(location) else os.path.expanduser(location)  # noqa: PTH111
    faults: list[str] = []
    inspection: Inspection | None = None
    previews: tuple[DocumentPreview, ...] = ()
    import_options: tuple[str, ...] = ()
    try:
        if kind == "ids":
            import_options = list_import_options(Path(expanded_location))
        else:
            inspection = inspect(expanded_location, seq_len=seq_len, first=0)
            faults += check(expanded_location).faults if full else []
        if kind == "store":
            previews = _preview_store(expanded_location, preview)
    except BatchloomError as error:
        faults.append(str(error))
    is_checked = full and kind != "ids"
    return PreparedFacts(location, kind, inspection, is_checked, tuple(faults), previews, import_options)


def _preview_store(location: str, most: int) -> tuple[DocumentPreview, ...]:
    store = open_store(location)
    previews = []
    for number in store.contents.list_first(most):
        ids = store[number].ids.astype(np.int64)
        span = (np.array([number]), np.zeros(1, np.int64), np.array([ids.size]))
        flags = store.reader.flags(*span)[0]
        origin = store.provenance.of(number)
        row = None if origin.line else origin.record + 1
        previews.append(make_preview(store.tokenizer, origin.source, (origin.line, row), ids, flags))
    return tuple(previews)


def quote_for_shell(word: str) -> str:
    r"""Quote a word for a shell; unprintable characters are escaped: ``$'a\x1bb'``."""
    if word.isprintable():
        return shlex.quote(word)
    plain = os.fsencode(word)
    spelled = "".join(chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}" for byte in plain)
    return f"$'{spelled}'"


def _join_proposals(reading: ReadRecipe, proposals: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the settings that notes propose, with the values that they have already."""
    values = {"clean": [step.name for step in reading.clean], "exclude": [*reading.exclude]}
    joined = {}
    for name, value in proposals:
        # The visible text of a page comes before other steps.
        values[name].insert(0 if name == "clean" else len(values[name]), value)
        joined[name] = ",".join(values[name])
    return joined


def _make_prepare_commands(
    options: Mapping[str, Any], recipe: Recipe, names: Sequence[str], examination: ExaminationResult
) -> list[str]:
    """Return the prepare commands: one, or one per distinct ``--map``.

    Empty if an input or a setting cannot be named on a command line, or if a fault remains that no ``--map`` fixes. A
    wrong mapping in a manifest is fixed in the manifest.

    Args:
        options: settings that a command must state.
        recipe: recipe of the diagnosis.
        names: inputs as the command line names them.
        examination: result of reading the inputs.
    """
    sources = () if recipe.sources else examination.diagnosis.sources
    suggested = {source.suggestion for source in sources if source.suggestion}
    refused = [source for source in sources if source.fault and not source.suggestion]
    curable_faults = {source.fault for source in sources if source.fault and source.suggestion}
    # A cleaning step with settings is no word of a command line.
    has_step_settings = any(step.settings for step in recipe.reading.clean)
    if has_step_settings or not all(names) or not curable_faults >= {*examination.diagnosis.faults}:
        return []
    if examination.tokenizer_missing:
        options = {**options, "tokenizer": _FALLBACK_TOKENIZER}
    if not suggested:
        return [_make_prepare_command(options, names, "")]
    if len(suggested) == 1 and not refused and all(source.suggestion for source in sources):
        return [_make_prepare_command(options, names, suggested.pop())]
    by_map: dict[str, list[str]] = {}
    for source in sources:
        if source not in refused:
            by_map.setdefault(source.suggestion or "", []).append(source.path)
    return [
        _make_prepare_command(options, paths, mapping, f"-{number}")
        for number, (mapping, paths) in enumerate(by_map.items(), 1)
    ]


def _make_prepare_command(options: Mapping[str, Any], inputs: Iterable[str], suggestion: str, suffix: str = "") -> str:
    mapped = {**options, "mapping": suggestion} if suggestion else options
    out = _choose_out_folder(_DEFAULT_OUT + suffix)
    words = ["batchloom", "prepare", *inputs, "--out", out, *_list_option_words(mapped)]
    return " ".join(map(quote_for_shell, words))


def _list_option_words(options: Mapping[str, Any]) -> list[str]:
    """Return settings as words of a command line."""
    classes = (Recipe, ReadRecipe, ChatRecipe, MediaRecipe)
    option_names = {field.name: field.option_names for cls in classes for field in list_settings(cls)}
    media = parse_media(options.get("media"))
    values = {name: value for name, value in options.items() if name != "media"}
    if media is not None:
        values |= {name: setting for name, setting in to_plain(media).items() if option_names.get(name)}
    words: list[str] = []
    for name, value in values.items():
        names = option_names[name]
        if isinstance(value, bool):
            # An option without a --no- form is off unless it is given.
            words += names[not value :][:1]
        elif name == "template_args":
            arguments: Any = parse_template_arguments(value)
            for key, argument in arguments.items():
                words += [names[0], format_template_argument(key, argument)]
        else:
            words += [names[0], _format_option_value(name, value)]
    return words


def _format_option_value(name: str, value: Any) -> str:
    if name == "split_on":
        return str(value).replace("\n", "\\n").replace("\t", "\\t")
    if name == "clean":
        return ",".join(step.name for step in parse_clean_steps(value))
    if isinstance(value, Mapping):
        return ",".join(f"{role}={column}" for role, column in value.items())
    return ",".join(value) if isinstance(value, list | tuple) else str(value)


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
    given = {name: value for name, value in options.items() if value is not None}
    request = make_request(raw_inputs or arguments, {"overlong": overlong, **given}, None)
    recipe = request.recipe
    PlanSpec(seq_len=seq_len, global_batch_size=1 if global_batch_size is None else global_batch_size)
    preview_count = as_int(preview)
    if preview_count is None or preview_count < 0:
        raise SettingsError([f"preview: {quote_value(preview)} is not a number of documents"])
    prepared = tuple(_examine_prepared(argument, seq_len, preview, full=full) for argument in prepared_inputs)
    prepared_diagnosis = _diagnose_prepared(prepared, recipe)
    if not raw_inputs:
        return prepared_diagnosis
    listener = progress or (lambda _: None)
    examination = examine_inputs(
        recipe, listener, full=full, preview=preview, tokenizer_optional="tokenizer" not in given
    )
    diagnosis = examination.diagnosis
    kinds = {source.way for source in diagnosis.sources if source.way}
    media = any(source.media for source in diagnosis.sources)
    # A loader's default policy for overlong documents.
    drops = media or kinds <= TEMPLATED_KINDS
    packing = None
    if not any(map(get_objective, kinds)):
        packing = estimate_packing(examination.lengths, examination.weights, seq_len, global_batch_size, drops=drops)
    warnings = list(diagnosis.warnings)
    if packing and packing.longer:
        longer = ("" if diagnosis.exact else "about ") + format_count(packing.longer, "document")
        warnings.append(
            f"{longer} {'is' if packing.longer == 1 else 'are'} longer than seq_len {packing.seq_len:,}: "
            f"{_describe_overlong_handling(kinds, media=media)}{'' if packing.sequences else ', and none is left'}."
        )
    if prepared:
        listed = ", ".join(facts.path for facts in prepared)
        warnings.append(f"Already prepared, so not an input of prepare: {listed}.")
    names = [input_name(argument) for argument in raw_inputs]
    # A command need not repeat what the inputs state themselves.
    default = default_tokenizer(ReadRecipe(media=parse_media(given.get("media"))))
    stated: dict[str, Any] = (
        {"tokenizer": recipe.tokenizer} if "tokenizer" in given or recipe.tokenizer == default else {}
    )
    stated |= given | ({"overlong": overlong} if overlong != "drop" else {})
    stated |= _join_proposals(recipe.reading, examination.proposals)
    commands = _make_prepare_commands(stated, recipe, names, examination)
    return replace(
        diagnosis,
        prepared=prepared,
        packing=packing,
        ways=estimate_feeds(examination, packing),
        faults=diagnosis.faults + prepared_diagnosis.faults,
        warnings=tuple(warnings),
        notes=(*request.notes, *diagnosis.notes, *filter(None, [describe_unused_weights(recipe.sources)])),
        commands=(*commands, *prepared_diagnosis.commands),
    )


def _diagnose_prepared(prepared: tuple[PreparedFacts, ...], recipe: Recipe) -> Diagnosis:
    """Return the diagnosis of the inputs that are prepared already."""
    inspections = [facts.inspection for facts in prepared if facts.inspection]
    return Diagnosis(
        inputs=tuple(map(input_name, recipe.inputs)),
        prepared=prepared,
        documents=sum(inspection.documents for inspection in inspections),
        tokens=sum(inspection.tokens for inspection in inspections),
        faults=tuple(fault for facts in prepared for fault in facts.faults),
        notes=tuple(note for facts in prepared if (note := _describe_prepared(facts))),
        commands=_list_usage_commands(prepared),
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


def _describe_prepared(prepared: PreparedFacts) -> str:
    if prepared.kind == "ids" and not prepared.faults:
        reasons = {
            "--dtype": " It does not record their dtype (uint16 for most vocabularies below 65,536).",
            "--copy": " It has a header, so new shards are written.",
        }
        return (
            f"{prepared.path} holds ids of tokens: name their tokenizer, whose end token ends documents unless --eod "
            f"or --document-tokens is given.{''.join(reasons[option] for option in prepared.import_options)}"
        )
    if prepared.inspection and prepared.inspection.objective:
        objective = OBJECTIVES[prepared.inspection.objective]
        return (
            f"{prepared.path} holds {objective.contents}: {objective.trainers} read it with {objective.reader}, and "
            "batchloom train rejects it."
        )
    if prepared.inspection and prepared.inspection.processor:
        return (
            f"{prepared.path} holds documents of a {prepared.inspection.processor}: FOLDER is the folder of a model "
            "for that processor (docs/how-to/prepare/media.md)."
        )
    return ""


def _list_usage_commands(prepared: Sequence[PreparedFacts]) -> tuple[str, ...]:
    """List the next command per prepared input: import for ids, otherwise train."""
    commands = []
    for facts in prepared:
        if facts.faults or (facts.inspection and facts.inspection.objective):
            continue
        path = facts.path
        quoted_path = quote_for_shell(facts.path)
        if facts.kind == "ids":
            words = ["batchloom import", quoted_path, "--out", quote_for_shell(path + "-store")]
            words += [f"{option} DTYPE" if option == "--dtype" else option for option in facts.import_options]
            commands.append(" ".join([*words, "--tokenizer TOKENIZER"]))
            continue
        if facts.kind == "prefix":
            quoted_path = quote_for_shell(path.removesuffix(".bin").removesuffix(".idx"))
        init = " --init FOLDER" if facts.inspection and facts.inspection.processor else ""
        commands.append(f"batchloom train --data {quoted_path}{init} --out run")
    return tuple(commands)


def estimate_packing(
    lengths: NDArray[np.int64],
    weights: NDArray[np.float64],
    seq_len: int,
    global_batch_size: int | None = None,
    *,
    drops: bool = False,
) -> PackingFacts | None:
    """Pack documents of these lengths like a pool of the plan; None without documents.

    Args:
        lengths: tokens of a document, ascending [N].
        weights: number of documents of each length [N].
        seq_len: tokens of a sequence.
        global_batch_size: sequences of a step, over all ranks.
        drops: whether documents longer than ``seq_len`` are dropped; otherwise they are cut.
    """
    if not round(float(weights.sum())) or not (lengths * weights).sum():
        return None
    is_longer = lengths > seq_len
    longer, longer_tokens = (
        round(float(total)) for total in (weights[is_longer].sum(), (lengths * weights)[is_longer].sum())
    )
    keeping = tuple((share, _find_keeping_length(lengths, weights, share)) for share in _KEPT_SHARES)
    if drops:
        fits = lengths <= seq_len
        lengths = lengths[fits]
        weights = weights[fits]
    documents = round(float(weights.sum()))
    tokens = float((lengths * weights).sum())
    # One pool with every length in proportion represents all pools.
    size = min(documents, POOL_SIZE)
    ends = np.cumsum(weights)
    sample_positions = (np.arange(size) + 0.5) / max(size, 1) * ends[-1:]
    pool = lengths[np.minimum(np.searchsorted(ends, sample_positions, side="right"), len(lengths) - 1)]
    packed = count_sequences(pool, seq_len, _DEFAULT_PACKING)
    pool_tokens = int(pool.sum())
    least = compute_min_sequences(pool, seq_len)
    sequences = packed if documents <= POOL_SIZE else round(tokens * packed / max(pool_tokens, 1))
    steps = None if global_batch_size is None else -(-sequences // global_batch_size)
    return PackingFacts(
        seq_len=seq_len,
        packing=_DEFAULT_PACKING,
        fill=pool_tokens / max(packed * seq_len, 1),
        bound=min(1.0, pool_tokens / max(least * seq_len, 1)),
        sequences=sequences,
        steps=steps,
        global_batch_size=global_batch_size,
        longer=longer,
        longer_tokens=longer_tokens,
        is_dropped=drops,
        keeping=keeping,
    )


def _find_keeping_length(lengths: NDArray[np.int64], weights: NDArray[np.float64], percent: int) -> int:
    """Return a sequence length that this share of documents fits into."""
    ends = np.cumsum(weights)
    # A sum of shares may be below their exact sum.
    index = int(np.searchsorted(ends, percent / 100 * ends[-1] * (1 - 1e-12)))
    return -(-int(lengths[index]) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE


def estimate_feeds(examination: ExaminationResult, packing: PackingFacts | None) -> tuple[FeedEstimate, ...]:
    """Estimate both ways; empty if the resulting documents are unknown."""
    diagnosis = examination.diagnosis
    documents = diagnosis.documents
    tokens = diagnosis.tokens or 0
    if (
        diagnosis.tokenizer is None
        or diagnosis.seconds is None
        or packing is None
        or not documents
        or not diagnosis.bytes
    ):
        return ()
    if diagnosis.faults:
        return ()
    batch = packing.global_batch_size or _DEFAULT_BATCH_SIZE
    batch_bytes = _PREFETCHED_BATCHES * batch * packing.seq_len * _TOKEN_BYTES
    plan_bytes = _CACHED_POOLS * min(documents, POOL_SIZE) * _SPAN_BYTES
    lanes = choose_default_lanes(batch, _estimate_record_ranges(diagnosis.sources))
    lane_documents = documents / lanes
    id_bytes = 2 if diagnosis.tokenizer.vocab_size < UINT16_IDS else 4
    pool = choose_lane_pool_size(media=any(source.media for source in diagnosis.sources))
    pool_bytes = 2 * lanes * min(lane_documents, pool) * tokens / documents * id_bytes
    media_disk_bytes = min(examination.held_bytes, 2 * lanes * pool * examination.held_bytes / documents)
    first_pool_bytes = max(min(lane_documents, FIRST_POOL) * diagnosis.bytes / documents, _CHUNK_BYTES)
    first_pool_seconds = min(lanes * first_pool_bytes, diagnosis.bytes) / diagnosis.bytes * diagnosis.seconds
    return (
        FeedEstimate(
            way="prepare",
            start_seconds=diagnosis.seconds,
            memory_bytes=plan_bytes + batch_bytes,
            disk_bytes=diagnosis.store_bytes or 0,
            lanes=None,
            steps=packing.steps,
        ),
        FeedEstimate(
            way="stream",
            start_seconds=_READY_SECONDS + first_pool_seconds,
            memory_bytes=round(pool_bytes) + batch_bytes + _WORKER_BYTES,
            disk_bytes=round(media_disk_bytes),
            lanes=lanes,
            steps=None,
        ),
    )


def _estimate_record_ranges(sources: Sequence[SourceFacts]) -> int:
    """Estimate the number of record ranges to distribute over lanes.

    A compressed file, a CSV file, a JSON list or a tar of samples is one range.
    """
    return sum(
        source.files
        if source.compression or source.format in WHOLE_KINDS
        else max(source.files, source.bytes // _MIN_RANGE_BYTES)
        for source in sources
    )
