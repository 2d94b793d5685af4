"""Choice of a job's tokenizer and chat template by recipe and inputs."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from batchloom.chat import NO_TEMPLATE, choose_template
from batchloom.core.errors import DamagedFileError, InputError
from batchloom.core.fingerprint import derive_key
from batchloom.preparation.documents.document_facts import iter_texts
from batchloom.preparation.documents.encode_chat import ChatEncoder
from batchloom.preparation.documents.masked_tokens import ControlEncoder
from batchloom.preparation.documents.record_parsers import TEMPLATED_KINDS, RecordParser, RecordParsers
from batchloom.preparation.identity.processors import open_job_processor, read_processor_template
from batchloom.preparation.settings.recipe import Recipe
from batchloom.sources import PartReader, SampleRange, SourcePart, iter_sample_ranges
from batchloom.sources.files import Source
from batchloom.store.format import UINT16_IDS, choose_token_dtype
from batchloom.text import normalize
from batchloom.tokens import (
    END_BY_CONFIG,
    END_OF_TEXT,
    Tokenizer,
    parse_train_spec,
    resolve_tokenizer,
    restore_tokenizer,
    train_tokenizer,
    verify_control_tokens,
    verify_engine,
)

OnNote = Callable[[str], None]


def choose_job_tokenizer(
    recipe: Recipe,
    sources: Sequence[Source],
    record_parsers: RecordParsers,
    on_note: OnNote,
    state: Mapping[str, Any] | None = None,
    on_found: Callable[[Tokenizer], object] = lambda _: None,
) -> Tokenizer:
    """Restore, train or load the tokenizer of a job, and verify its engine.

    Args:
        recipe: names the tokenizer.
        sources: inputs to train and verify the tokenizer on.
        record_parsers: record parser of each source.
        on_note: receives notes for the user.
        state: tokenizer state of an earlier run.
        on_found: called with the tokenizer before its engine is verified.

    Raises:
        TokenizerError: the tokenizer cannot be found, read or verified.
        InputError: the tokenizer does not fit these inputs.
    """

    def sample(most: int, probe: int) -> list[str]:
        return sample_texts(sources, record_parsers, normalized=recipe.reading.normalize, most=most, probe=probe)

    size = parse_train_spec(recipe.tokenizer)
    if state is not None:
        tokenizer = restore_tokenizer(state)
    elif size is not None:
        if recipe.end_token not in (None, END_OF_TEXT):
            raise InputError(
                f"{recipe.tokenizer} has one control token, {END_OF_TEXT}, and not {recipe.end_token!r}: leave "
                "--end-token out."
            )
        _check_no_token_rows(sources, record_parsers)
        training_texts = list(limit_distinct_texts(sample(TRAIN_BYTES, TRAIN_PROBE_BYTES)))
        tokenizer = train_tokenizer(training_texts, size)
        # Without any text (for example only bad records) the job ends soon with its own message.
        if tokenizer.vocab_size < size and any(training_texts):
            on_note(
                f"train:{size} gave {tokenizer.vocab_size:,} ids: the input has no more pairs that occur at least "
                "twice. Add text, or request a smaller number."
            )
    else:
        tokenizer = resolve_tokenizer(recipe.tokenizer, end_token=recipe.end_token)
    on_found(tokenizer)
    tokenizer = verify_engine(tokenizer, sample(VERIFY_BYTES, VERIFY_PROBE_BYTES))
    if tokenizer.engine.note:
        on_note(f"Encoding with {tokenizer.engine.name}: {tokenizer.engine.note}")
    if tokenizer.lossy:
        on_note(
            f"Tokenizer {tokenizer.name!r} has no token for unknown characters: they are left out of the documents "
            "and not counted. Give its tokenizer.json an unk_token, byte_fallback or all 256 bytes, or choose "
            "another --tokenizer."
        )
    joins_texts = recipe.chat.template == NO_TEMPLATE
    parsers = (record_parsers.get_parser(source) for source in sources)
    if any(parser.ended or (parser.templated and joins_texts) for parser in parsers) and (
        note := describe_end_token(tokenizer, recipe.end_token)
    ):
        on_note(note)
    return tokenizer


def describe_end_token(tokenizer: Tokenizer, end_token: str | None) -> str:
    """Describe the token that ends plain documents; "" if every tool appends it."""
    end = next((token for token, number in tokenizer.control.items() if number == tokenizer.end_id), "")
    eos = tokenizer.chat.tokens.get("eos_token", end)
    ending = f"Plain documents end with {end!r} (id {tokenizer.end_id})"
    if end_token == END_BY_CONFIG:
        return f"{ending}, the eos_token of tokenizer_config.json (--end-token {END_BY_CONFIG})."
    if end == eos:
        return ""
    reason = "as --end-token says" if end_token is not None else "which ends texts in this vocabulary"
    return (
        f"{ending}, {reason}. The eos_token of tokenizer_config.json is {eos!r}, which TRL and Megatron append "
        f"(--end-token {END_BY_CONFIG})."
    )


def choose_job_template(
    recipe: Recipe, sources: Sequence[Source], record_parsers: RecordParsers, tokenizer: Tokenizer, on_note: OnNote
) -> ChatEncoder | None:
    """Return tokenizer and template for a job's conversations; None if it has none.

    Raises:
        TemplateError: the template does not exist or cannot be used.
    """
    record_kinds = {record_parsers.get_parser(source).record_kind for source in sources}
    media = recipe.reading.media
    if media is not None and record_kinds & {"conversation", "interleaved", "pairs", "labels"}:
        for note in open_job_processor(media, recipe.tokenizer).notes:
            on_note(f"{note}.")
    if not record_kinds & TEMPLATED_KINDS:
        # No conversation is rendered, but an unknown template name is still an error.
        template = recipe.chat.template
        choose_template(template or "plain", tokenizer.chat.templates, tokenizer.control, tokenizer.name)
        return None
    encoder = make_chat_encoder(tokenizer, recipe)
    if encoder.tokenizer is not tokenizer:
        engine = encoder.tokenizer.engine
        on_note(f"Encoding conversations with {engine.name}: {engine.note}")
    for note in encoder.notes:
        on_note(f"{note[:1].upper()}{note[1:]}.")
    return encoder


def find_unused_columns(record_parsers: Iterable[RecordParser], encoder: ChatEncoder | None) -> tuple[str, ...]:
    """Return columns and message keys that neither batchloom nor the template reads."""
    names: dict[str, None] = {}
    for record_parser in record_parsers:
        names |= dict.fromkeys(record_parser.unused_columns)
        names |= {
            f"messages[].{key}": None
            for key in record_parser.unused_keys
            if encoder is None or not encoder.renderer.may_read_key(key)
        }
        names |= {
            f"{column}.{name}": None
            for name, column in record_parser.template_arguments.items()
            if encoder is None or name not in encoder.renderer.variables
        }
    return tuple(names)


def make_chat_encoder(tokenizer: Tokenizer, recipe: Recipe) -> ChatEncoder:
    """Make the chat encoder of a recipe, on an engine exact for control tokens.

    Raises:
        TemplateError: the template does not exist or cannot be used.
    """
    token_encoder = verify_control_tokens(tokenizer)
    media = recipe.reading.media
    chat = recipe.chat
    processor_template = None if media is None else read_processor_template(media)
    return ChatEncoder(
        token_encoder,
        chat.template,
        date=chat.date,
        arguments=chat.template_args,
        tool_format=chat.tool_format,
        families={} if media is None else open_job_processor(media, recipe.tokenizer).families,
        templates={} if processor_template is None else {"default": processor_template},
    )


def make_media_encoder(tokenizer: Tokenizer, recipe: Recipe, chat: ChatEncoder | None) -> ControlEncoder | None:
    """Return the tokenizer for texts with media; None if media are not read.

    Args:
        tokenizer: tokenizer of the job.
        recipe: recipe of the job.
        chat: the same tokenizer with a template, if the job has one.

    Raises:
        TokenizerError: the tokenizer lacks the processor's tokens.
    """
    media = recipe.reading.media
    if media is None or chat is not None:
        return chat
    families = open_job_processor(media, recipe.tokenizer).families
    return ControlEncoder(verify_control_tokens(tokenizer), families)


def choose_dtype_name(recipe: Recipe, tokenizer: Tokenizer) -> str:
    """Return the name of the token dtype on disk.

    Raises:
        InputError: the recipe's dtype is too small for the vocabulary.
    """
    if recipe.dtype == "uint16" and tokenizer.vocab_size > UINT16_IDS:
        raise InputError(
            f"--dtype uint16 holds ids up to {UINT16_IDS - 1:,}, and tokenizer {tokenizer.name!r} has "
            f"{tokenizer.vocab_size:,} ids; leave --dtype out, or give int32."
        )
    return choose_token_dtype(recipe.dtype, tokenizer.vocab_size)


def _check_no_token_rows(sources: Sequence[Source], record_parsers: RecordParsers) -> None:
    """Raise if a source has token ids, which no newly trained tokenizer can have made."""
    for source in sources:
        if record_parsers.get_parser(source).record_kind == "tokens":
            raise InputError(
                f"{source.name} holds token ids, which a newly trained tokenizer cannot have made: name the "
                "tokenizer that made them with --tokenizer, or leave this source out"
            )


TRAIN_BYTES = 32 << 20
TRAIN_PROBE_BYTES = 1 << 20
VERIFY_BYTES = 256 << 10
VERIFY_PROBE_BYTES = 32 << 10

_DISTINCT_BYTES = 3 << 20
_PIECE_CHARACTERS = 1 << 16
_WORDS = re.compile(r"\w+|[^\w\s]+")


def sample_texts(
    sources: Sequence[Source], record_parsers: RecordParsers, *, normalized: bool, most: int, probe: int
) -> list[str]:
    """Return texts from hash-chosen positions of the input, or all of a small one.

    Plain files are read at the positions; compressed files and one-document files are read from their
    beginning only. ``most`` limits the characters of the sample, ``probe`` is the bytes read per position.
    """
    texts: list[str] = []
    remaining = most
    for text in _iter_candidates(sources, record_parsers, most, probe):
        if not remaining:
            break
        excerpt = (normalize(text) if normalized else text)[:remaining]
        remaining -= len(excerpt)
        if excerpt:
            texts.append(excerpt)
    return texts


def limit_distinct_texts(texts: Iterable[str]) -> Iterator[str]:
    """Yield as much of a sample as a tokenizer can train on in bounded memory.

    Training takes about 60 bytes of memory per byte of distinct words; prose has few, random strings nothing
    else. Chunks are taken in hash order, so that a truncated sample still covers all inputs.
    """
    chunks = [text[at : at + _PIECE_CHARACTERS] for text in texts for at in range(0, len(text), _PIECE_CHARACTERS)]
    order = sorted(range(len(chunks)), key=lambda number: derive_key("piece", number))
    words: set[str] = set()
    size = 0
    for number in order:
        fresh = set(_WORDS.findall(chunks[number])).difference(words)
        size += sum(len(word.encode()) for word in fresh)
        if size > _DISTINCT_BYTES and words:
            return
        words |= fresh
        yield chunks[number]


def _iter_part_texts(part: SourcePart, record_parsers: RecordParsers) -> Iterator[str]:
    record_parser = record_parsers.get_parser(part.source)
    # Damaged files are left out and named when the input is prepared, as bad records are.
    with suppress(DamagedFileError), PartReader(part, record_parser.rules) as reader:
        for batch in reader:
            record_parser.parse_records(batch)
            for document in batch.values:
                yield from iter_texts(document)


def _iter_candidates(sources: Sequence[Source], record_parsers: RecordParsers, most: int, size: int) -> Iterator[str]:
    has_texts = False
    if sum(source.size for source in sources) > most:
        for _, probe in iter_sample_ranges(sources, record_parsers.rules, most // size, size):
            for text in _truncate_probe(_iter_part_texts(probe.part, record_parsers), probe, size):
                has_texts = True
                yield text
    # Records larger than a probe may slip through all of them.
    if not has_texts:
        for source in sources:
            yield from _iter_part_texts(SourcePart(source, 0, source.size), record_parsers)


def _truncate_probe(texts: Iterator[str], probe: SampleRange, size: int) -> Iterator[str]:
    """Yield the text of a probe, limited by the number of positions it covers."""
    if probe.position_count is None:
        yield from texts
        return
    remaining = size * probe.position_count
    for text in texts:
        yield text[:remaining]
        remaining -= len(text)
        if remaining <= 0:
            return
