"""Record parsers of sources, chosen by the schema of their first records."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, final

import msgspec
import xxhash

from batchloom.chat import (
    NO_TEMPLATE,
    compute_record_shape,
    detect_schema,
    make_record_reader,
    replace_media_with_frames,
    unused_columns,
)
from batchloom.chat.schema import (
    TURN_ROLES,
    ParsedRecord,
    RecordReader,
    RecordShape,
    Schema,
    get_column_value,
    is_column_path,
    is_non_empty,
    list_template_arguments,
    parse_messages,
    unused_message_keys,
)
from batchloom.core.document import (
    CarryingPrompt,
    Conversation,
    InterleavedText,
    LabelledConversation,
    PreferencePair,
    Records,
)
from batchloom.core.errors import InputError, SchemaError, UnusableRecordError
from batchloom.media import MediaInspector, MediaLimits, MediaResolver
from batchloom.preparation.documents.media_folders import (
    CAPTIONS_NOTE,
    MediaByStem,
    add_file_columns,
    is_media_table,
    is_possible_caption,
    list_media_by_stem,
    make_captioned,
)
from batchloom.preparation.identity.processors import open_job_processor
from batchloom.preparation.settings.media_recipe import MediaRecipe
from batchloom.preparation.settings.recipe import ChatRecipe, Recipe
from batchloom.sources import PartReader, ReadLimits, ReadRules, SourcePart
from batchloom.sources.files import Source
from batchloom.sources.formats import SNIPPET_BYTES
from batchloom.store.format import OBJECTIVES, ObjectiveName

RecordKind = Literal[
    "text",
    "interleaved",
    "segments",
    "conversation",
    "tokens",
    "pairs",
    "text-pairs",
    "labels",
    "prompts",
]

# Record kinds that a chat template renders.
TEMPLATED_KINDS: frozenset[str] = frozenset({"conversation", "pairs", "labels", "prompts"})
# Schema description of a text column named "text".
PLAIN_TEXT_NOTE = "text -> plain text"
WHOLE_TEXTS = "max_tokens is for conversations; texts stay whole, as those of"
_SAMPLE_RECORDS = 100
_SAMPLE_BYTES = 8 << 20
_MAX_SAMPLE_BYTES = 64 << 20
_TEXT_KINDS = ("text", "code")
# Rules for training of documents that have no turns.
_NO_CHAT = ChatRecipe()
_MAX_CACHED_SCHEMAS = 1024


@dataclass(frozen=True, slots=True)
class RecordParser:
    """Parser of the records of one source.

    Attributes:
        rules: read rules of the source.
        record_kind: kind of its documents.
        record_reader: converts a row to a document; None if the source yields texts already.
        chat: rules for training on its conversations, preferences or segments.
        detected: one-line description for the user, empty for text files.
        columns: columns of each role in the first records.
        own_folder: media paths are relative to the source, even if a data folder is configured.
        unused_columns: columns of the first records that are neither read nor known as metadata.
        unused_keys: likewise the keys of messages, which the template may read.
        template_arguments: names of the template arguments in the first records, each with its column.
    """

    rules: ReadRules
    record_kind: RecordKind = "text"
    record_reader: RecordReader | None = None
    chat: ChatRecipe = _NO_CHAT
    detected: str = ""
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)
    own_folder: bool = False
    unused_columns: tuple[str, ...] = field(default=(), compare=False)
    unused_keys: tuple[str, ...] = field(default=(), compare=False)
    template_arguments: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def objective(self) -> ObjectiveName:
        """Objective of its documents; empty for the next token."""
        return get_objective(self.record_kind)

    @property
    def templated(self) -> bool:
        """True if a chat template renders its documents; the rendered text is not changed."""
        return self.record_kind in TEMPLATED_KINDS

    @property
    def ended(self) -> bool:
        """True if its documents get an end token, and BOS if the model expects it."""
        return self.record_kind in ("text", "interleaved", "text-pairs")

    def parse_records(self, batch: Records) -> None:
        """Turn the rows of a batch into documents; unusable ones become bad records."""
        if self.record_reader is not None:
            batch.convert(self.record_reader, _make_excerpt)


def _make_excerpt(row: Any) -> str:
    return msgspec.json.encode(row, enc_hook=str)[:SNIPPET_BYTES].decode("utf-8", "replace")


@final
class RecordParsers:
    """Record parsers of all sources of a job, decided by first records and recipe.

    Attributes:
        rules: how sources are split and text files read.

    Raises:
        SchemaError: the records of a source fit no schema.
        InputError: a source has unsupported content or cannot be read.
    """

    def __init__(self, recipe: Recipe, limits: ReadLimits) -> None:
        self.rules = recipe.reading.rules(limits)
        self._text = RecordParser(self.rules)
        self._rows = replace(self.rules, text_field=None)
        self._recipe = recipe
        # By hash, as the paths of a million files take 90 MB.
        self._parsers_by_path: dict[int, RecordParser] = {}
        # A folder may hold very many texts, which are read in sequence, so only the latest folder is cached.
        self._folder: tuple[str, MediaByStem, MediaInspector | None] | None = None
        # Most of many files share their columns.
        self._parsers_by_shape: dict[tuple[int, RecordShape], RecordParser] = {}

    def get_parser(self, source: Source) -> RecordParser:
        """Return the parser of a source; the first records are read once per source."""
        if source.kind in _TEXT_KINDS:
            return self._caption_parser(source) or self._text
        key = xxhash.xxh3_128_intdigest(source.path.encode("utf-8", "surrogatepass"))
        record_parser = self._parsers_by_path.get(key)
        if record_parser is None:
            record_parser = self._parsers_by_path[key] = self._detect(source)
        return record_parser

    def get_objective(self, source: Source) -> ObjectiveName | None:
        """Return the objective of a source; None if it has no records."""
        record_parser = self.get_parser(source)
        return record_parser.objective if record_parser.detected or source.kind in _TEXT_KINDS else None

    def _detect(self, source: Source) -> RecordParser:
        field, mapping = self._recipe.columns(source.input)
        is_tar = source.kind == "webdataset"
        inspector = self._make_media_checker(source, own_folder=is_tar)
        if field is not None and inspector is None and not is_column_path(field):
            rules = replace(self.rules, text_field=field)
            columns = {"text": (field,)}
            return RecordParser(rules, detected=f"{field} -> plain text", columns=columns)
        if field is not None:
            mapping = {**mapping, "text": field}
        rows, is_complete = read_sample_rows(source, self._rows)
        is_file_table = inspector is not None and is_media_table(source)
        if is_file_table:
            rows = list(_add_files_to_rows(rows))
        if not rows:
            # A source without any record needs no text column. If more records may follow, reading it as text
            # reports the problem of each one, until there are too many.
            return RecordParser(replace(self.rules, text_field=None if is_complete else "text"))
        shape = compute_record_shape(rows)
        # Media paths depend on the folder of the source, so parsers with media are not shared.
        key = None if shape is None or inspector else (source.input, shape)
        if key is not None and key in self._parsers_by_shape:
            return self._parsers_by_shape[key]
        try:
            ignore = (*self._recipe.reading.ignore, *self._recipe.source(source.input).ignore)
            carry = self._recipe.reading.carried_columns
            schema = detect_schema(rows, mapping, media=inspector is not None, ignore=ignore, carry=carry)
            record_parser = make_record_parser(source, rows, self.rules, schema, self._recipe.chat, inspector)
        except SchemaError as error:
            settings = self._recipe.source(source.input)
            message = f"{source.name}: {error}"
            if settings.location:
                # In a file of data sets, its own keys replace the command-line options.
                message = f"{settings.location}: {message} (use mapping: in that file)"
            raise SchemaError(message, error.columns, error.suggestion) from None
        record_parser = replace(
            record_parser,
            unused_columns=unused_columns(rows, schema),
            unused_keys=unused_message_keys(rows, schema),
            template_arguments=list_template_arguments(rows, schema),
        )
        if is_file_table and record_parser.record_reader is not None:
            record_parser = replace(record_parser, record_reader=_wrap_file_rows(record_parser.record_reader))
        if is_tar:
            record_parser = replace(record_parser, own_folder=True)
        if key is not None and len(self._parsers_by_shape) < _MAX_CACHED_SCHEMAS:
            self._parsers_by_shape[key] = record_parser
        return record_parser

    def _caption_parser(self, source: Source) -> RecordParser | None:
        """Return the parser of a caption of adjacent media; None for any other text."""
        if self._recipe.reading.media is None or not is_possible_caption(source, self.rules.limits):
            return None
        folder = _parent_folder(source)
        if self._folder is None or self._folder[0] != folder:
            self._folder = (folder, list_media_by_stem(folder), self._make_media_checker(source, own_folder=True))
        _, media_by_stem, inspector = self._folder
        media = media_by_stem.get(source.path.rpartition("/")[2].rpartition(".")[0])
        if not media:
            return None

        def read(text: Any) -> ParsedRecord:
            document = make_captioned(media, text)
            return replace_media_with_frames(document, inspector(document.media)) if inspector else document

        rules = replace(self.rules, split_on="file")
        return RecordParser(rules, "interleaved", read, detected=CAPTIONS_NOTE, own_folder=True)

    def media_folder(self, source: Source) -> str | None:
        """Return the base folder of a source's media paths; None if media are not read."""
        media = self._recipe.reading.media
        own = media is not None and self.get_parser(source).own_folder
        return None if media is None else self._choose_media_folder(media, source, own_folder=own)

    @property
    def reads_media(self) -> bool:
        """True if media are read."""
        return self._recipe.reading.media is not None

    @property
    def media_limits(self) -> MediaLimits:
        """Size limits of media."""
        media = self._recipe.reading.media
        return MediaLimits() if media is None else media.limits

    def _make_media_checker(self, source: Source, *, own_folder: bool = False) -> MediaInspector | None:
        """Make the media inspector of a source; None if media are not read."""
        media = self._recipe.reading.media
        if media is None:
            return None
        kinds = open_job_processor(media, self._recipe.tokenizer).families
        resolver = MediaResolver(
            self._choose_media_folder(media, source, own_folder=own_folder),
            media.limits,
            # Media inside a tar are resolved in the tar's folder; the Hub's cache consists of symlinks.
            follow_links=own_folder or bool(source.revision) or self._recipe.follow_links,
        )
        return MediaInspector(resolver, kinds, media.sampling, embed=media.keep == "embed")

    def _choose_media_folder(self, media: MediaRecipe, source: Source, *, own_folder: bool) -> str:
        data_folder = None if own_folder else self._recipe.source(source.input).media_folder or media.data_folder
        return data_folder or _parent_folder(source)


def _parent_folder(source: Source) -> str:
    return source.path.rpartition("/")[0] or "."


def _add_files_to_rows(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        with contextlib.suppress(UnusableRecordError):
            yield dict(add_file_columns(row))


def _wrap_file_rows(record_reader: RecordReader) -> RecordReader:
    """Wrap a reader for rows of a table of files."""
    return lambda row: record_reader(add_file_columns(row))


def get_objective(record_kind: str) -> ObjectiveName:
    """Return the objective of records of this kind; empty for the next token."""
    name = record_kind.removeprefix("text-")
    return cast("ObjectiveName", name if name in OBJECTIVES else "")


def describe_contents(objective: ObjectiveName) -> str:
    """Return a plural name for documents of an objective."""
    return OBJECTIVES[objective].contents if objective else "documents for language modelling"


def check_one_objective(sources: Sequence[Source], record_parsers: RecordParsers) -> None:
    """Check that all inputs have the same objective.

    Raises:
        InputError: they do not; it names the first source of each objective.
    """
    first: dict[ObjectiveName, str] = {}
    for source in sources:
        if (objective := record_parsers.get_objective(source)) is not None:
            first.setdefault(objective, source.name)
    if len(first) > 1:
        contents = " and ".join(f"{describe_contents(objective)} ({name})" for objective, name in first.items())
        raise InputError(
            f"The inputs hold {contents}: all documents of a store serve one objective. Prepare them into separate "
            "stores."
        )


def check_loader_reads(sources: Sequence[Source], record_parsers: RecordParsers) -> None:
    """Check that a loader, which trains the next token, can read the documents.

    Raises:
        InputError: a source holds other documents.
    """
    for source in sources:
        if objective := record_parsers.get_objective(source):
            raise InputError(OBJECTIVES[objective].describe_refusal(source.name))


def make_record_parser(
    source: Source,
    rows: Sequence[Mapping[str, Any]],
    rules: ReadRules,
    schema: Schema,
    chat: ChatRecipe,
    inspector: MediaInspector | None = None,
) -> RecordParser:
    """Make the parser of a source with these first records.

    With an ``inspector`` its documents may hold media.
    """
    columns = _find_filled_columns(schema, rows)
    text_column = _find_text_column(schema, rows)
    if text_column is not None and "weight" not in columns and inspector is None:
        # The fast text reader reads this column.
        has_weights = "weight" not in schema.ignored | schema.left_out
        rules = replace(rules, text_field=text_column, late_field="weight" if has_weights else None)
        return RecordParser(rules, detected=schema.description, columns=columns)
    rules = replace(rules, text_field=None)
    joins_texts = chat.template == NO_TEMPLATE
    is_csv = source.kind in ("csv", "tsv")
    is_table = source.kind in ("parquet", "arrow", "hf_dataset")
    if schema.kind in ("preference", "prompt"):
        record_parser = _make_objective_parser(
            source, rows, rules, schema, chat, media=inspector is not None, is_table=is_table
        )
    elif schema.kind == "conversation":
        record_reader = make_record_reader(
            schema,
            media=inspector is not None,
            has_text_numbers=is_csv,
            has_inserted_nulls=is_table,
            default_system=chat.default_system,
        )
        chat = chat.resolve_train_on(completion=schema.form == "prompt-completion")
        record_parser = RecordParser(
            rules, "conversation", record_reader, chat, detected=schema.description, columns=columns
        )
    elif schema.kind == "segments":
        record_reader = make_record_reader(schema)
        chat = chat.resolve_train_on(completion=False)
        record_parser = RecordParser(rules, "segments", record_reader, chat, schema.description, columns)
    else:
        record_kind: RecordKind = schema.kind if schema.kind in ("text", "interleaved") else "tokens"
        record_reader = make_record_reader(schema, has_text_numbers=is_csv)
        record_parser = RecordParser(rules, record_kind, record_reader, detected=schema.description, columns=columns)
    if joins_texts and record_parser.templated and record_parser.record_reader is not None:
        _check_holds_texts(source, rows, schema)
        record_parser = replace(record_parser, record_reader=_wrap_texts(record_parser.record_reader, schema))
    if inspector is None or record_parser.record_reader is None:
        return record_parser
    if schema.kind in ("conversation", "interleaved", "preference"):
        record_reader = _wrap_check_media(record_parser.record_reader, inspector)
    elif schema.kind != "prompt":
        record_reader = _wrap_refuse_media(record_parser.record_reader)
    else:
        return record_parser
    return replace(record_parser, record_reader=record_reader)


_JOINED_REMEDY = (
    f"--template {NO_TEMPLATE} joins a prompt and its completion, which are texts: leave it out to render "
    "messages with a chat template, or name columns of texts (--map prompt=...,completion=...)"
)


def _check_holds_texts(source: Source, rows: Sequence[Mapping[str, Any]], schema: Schema) -> None:
    """Refuse a source of messages, which only a chat template turns into text."""
    columns = [name for role in TURN_ROLES for name in schema.columns.get(role, ())]
    first = next((row for row in rows if all(is_non_empty(get_column_value(row, name)) for name in columns)), {})
    if schema.form == "messages" or any(_is_messages(get_column_value(first, name)) for name in columns):
        raise InputError(f"{source.name} holds messages ({schema.description}), and {_JOINED_REMEDY}.")


def _is_messages(value: Any) -> bool:
    return isinstance(parse_messages(value), list | dict)


def _wrap_texts(record_reader: RecordReader, schema: Schema) -> RecordReader:
    """Wrap a reader to accept only a prompt and answers that are texts."""
    columns = [name for role in TURN_ROLES for name in schema.columns.get(role, ())]

    def read(row: Mapping[str, Any]) -> ParsedRecord:
        for name in columns:
            if _is_messages(get_column_value(row, name)):
                raise UnusableRecordError(f"column {name!r} holds messages, and {_JOINED_REMEDY}")
        record = record_reader(row)
        for conversation in _list_conversations(record):
            if (
                len(conversation.messages) > (1 if conversation.is_prompt else 2)
                or conversation.tools
                or conversation.media
            ):
                raise UnusableRecordError(
                    "it has more than a prompt and its completion (a system turn, earlier turns, tools or media), and "
                    f"{_JOINED_REMEDY}"
                )
        return record

    return read


def _list_conversations(record: ParsedRecord) -> list[Conversation]:
    if isinstance(record, PreferencePair):
        return [side for side in (record.chosen, record.rejected) if isinstance(side, Conversation)]
    if isinstance(record, LabelledConversation | CarryingPrompt):
        return [record.conversation]
    return [record] if isinstance(record, Conversation) else []


def _wrap_refuse_media(record_reader: RecordReader) -> RecordReader:
    """Wrap a reader of a file without media to reject later records with media."""

    def refused(row: Mapping[str, Any]) -> ParsedRecord:
        for name in _MEDIA_COLUMNS:
            if is_non_empty(row.get(name)):
                raise UnusableRecordError(
                    f"column {name!r} is not empty, and the first records of the file have no media: keep records with "
                    "images or audio in a separate file, or leave the column out"
                )
        return record_reader(row)

    return refused


_MEDIA_COLUMNS = ("images", "image", "audios", "audio", "videos", "video")


def _wrap_check_media(record_reader: RecordReader, inspector: MediaInspector) -> RecordReader:
    """Wrap a reader of conversations or texts with media to inspect their media."""

    def inspect_document(document: Any) -> Any:
        if isinstance(document, Conversation | InterleavedText) and document.media:
            return replace_media_with_frames(document, inspector(document.media))
        return document

    def read(row: Mapping[str, Any]) -> ParsedRecord:
        record = record_reader(row)
        if isinstance(record, PreferencePair):
            return PreferencePair(inspect_document(record.chosen), inspect_document(record.rejected))
        if isinstance(record, LabelledConversation):
            return replace(record, conversation=inspect_document(record.conversation))
        return cast("ParsedRecord", inspect_document(record))

    return read


def _make_objective_parser(
    source: Source,
    rows: Sequence[Mapping[str, Any]],
    rules: ReadRules,
    schema: Schema,
    chat: ChatRecipe,
    *,
    media: bool,
    is_table: bool,
) -> RecordParser:
    record_reader = make_record_reader(
        schema,
        media=media and schema.kind == "preference",
        has_inserted_nulls=is_table,
        default_system=chat.default_system,
    )
    record_kind: RecordKind
    if schema.kind == "prompt":
        record_kind = "prompts"
    elif schema.form != "pair":
        record_kind = "labels"
    else:
        column = schema.columns["chosen"][0]
        first = next((v for row in rows if (v := get_column_value(row, column)) is not None), None)
        is_text = "prompt" not in schema.columns and isinstance(parse_messages(first), str)
        record_reader = _wrap_same_kind(record_reader, is_text=is_text)
        record_kind = "text-pairs" if is_text else "pairs"
    objective = OBJECTIVES[get_objective(record_kind)]
    if chat.train_on not in (None, "completion"):
        raise InputError(
            f"{source.name} holds {objective.contents} ({schema.description}), and {objective.trained}: leave "
            f"--train-on {chat.train_on} out"
        )
    chat = chat.resolve_train_on(completion=True)
    return RecordParser(rules, record_kind, record_reader, chat, schema.description, _find_filled_columns(schema, rows))


def _wrap_same_kind(record_reader: RecordReader, *, is_text: bool) -> RecordReader:
    """Wrap a reader of pairs to accept only texts, or only conversations."""

    def alike(row: Mapping[str, Any]) -> ParsedRecord:
        pair = record_reader(row)
        if isinstance(pair, PreferencePair) and isinstance(pair.chosen, str) is not is_text:
            actual_kind, expected_kind = ("texts", "messages")[:: -1 if is_text else 1]
            raise UnusableRecordError(
                f"its answers are {actual_kind} where those of the first records are {expected_kind}: use one "
                "form, or keep them in separate files"
            )
        return pair

    return alike


def read_sample_rows(source: Source, rules: ReadRules) -> tuple[list[dict[str, Any]], bool]:
    """Read up to 100 first records of a source as full rows.

    Only its first 8 MiB are read, or its first 64 MiB if those contain no record.

    Returns:
        The rows, and True if the source was read to its end.
    """
    rows: list[dict[str, Any]] = []
    row_rules = replace(rules, text_field=None) if rules.text_field is not None else rules
    with PartReader(SourcePart(source, 0, source.size), row_rules) as reader:
        for batch in reader:
            rows += batch.values
            max_bytes = _SAMPLE_BYTES if rows else _MAX_SAMPLE_BYTES
            if len(rows) >= _SAMPLE_RECORDS or reader.consumed >= max_bytes:
                return rows[:_SAMPLE_RECORDS], False
    return rows, True


def _find_filled_columns(schema: Schema, rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return the non-empty columns of each role in these records."""
    columns_by_role = {
        role: tuple(name for name in names if any(is_non_empty(get_column_value(r, name)) for r in rows))
        for role, names in schema.columns.items()
    }
    return {role: names for role, names in columns_by_role.items() if names}


def _find_text_column(schema: Schema, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the column that alone is the text, which the fast text reader can read."""
    if schema.form != "text":
        return None
    (column,) = schema.columns["text"]
    return column if any(column in row for row in rows) else None
