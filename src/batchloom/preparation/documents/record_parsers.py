"""How the records of each source become documents: the schema their first records have."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

import msgspec

from batchloom.chat import (
    compute_record_shape,
    detect_schema,
    make_record_reader,
    replace_media_with_frames,
    unused_columns,
)
from batchloom.chat.schema import (
    ParsedRecord,
    RecordReader,
    RecordShape,
    Schema,
    get_column_value,
    is_non_empty,
    parse_messages,
    unused_message_keys,
)
from batchloom.core.conversation import (
    Conversation,
    InterleavedText,
    LabelledConversation,
    PreferencePair,
)
from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import InputError, SchemaError, UnusableRecordError
from batchloom.media import MediaInspector, MediaLimits, MediaResolver
from batchloom.preparation.documents.caption_files import (
    MediaByStem,
    add_file_columns,
    is_media_table,
    is_possible_caption,
    list_media_by_stem,
    make_captioned,
)
from batchloom.preparation.documents.media_processor import open_job_processor
from batchloom.preparation.settings import ChatRecipe, ChatRules, MediaRecipe, Recipe
from batchloom.sources import PartReader, ReadLimits, ReadRules, SourcePart
from batchloom.sources.files import Source
from batchloom.sources.formats import SNIPPET_BYTES
from batchloom.store.format import PreferenceKind

RecordKind = Literal["text", "interleaved", "conversation", "tokens", "pairs", "text-pairs", "labels"]

# Ways whose documents a chat template renders.
TEMPLATED_KINDS: frozenset[str] = frozenset({"conversation", "pairs", "labels"})
# What is detected where a column called text holds text.
PLAIN_TEXT_NOTE = "text -> plain text"
# What is said of texts beside media of their names.
CAPTIONS_NOTE = "texts beside media of the same name -> text with media"
_SAMPLE_RECORDS = 100
_SAMPLE_BYTES, _MAX_SAMPLE_BYTES = 8 << 20, 64 << 20
_TEXT_KINDS = ("text", "code")
_MAX_CACHED_SCHEMAS = 1024
_PREFERENCE_KINDS: dict[RecordKind, PreferenceKind] = {
    "pairs": "pairs",
    "text-pairs": "pairs",
    "labels": "labels",
}

_PREFERENCE_LABELS = {
    "": "documents that are no preferences",
    "pairs": "preference pairs",
    "labels": "labelled answers",
}


@dataclass(frozen=True, slots=True)
class RecordParser:
    """How the records of one source become documents.

    Attributes:
        rules: how the source is read.
        record_kind: what its documents are.
        record_reader: from a row to what it holds; None where the source gives texts already.
        chat: what is trained of its conversations or preferences; None where it has none.
        detected: one line for people, empty for text files.
        columns: for each role the columns that hold it in the first records.
        own_folder: whether paths of media begin at the source, also where a folder of data is named.
        unused_columns: columns of the first records that are neither read nor known as metadata.
        unused_keys: likewise the keys of messages, which the template may read.
    """

    rules: ReadRules
    record_kind: RecordKind = "text"
    record_reader: RecordReader | None = None
    chat: ChatRules | None = None
    detected: str = ""
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)
    own_folder: bool = False
    unused_columns: tuple[str, ...] = field(default=(), compare=False)
    unused_keys: tuple[str, ...] = field(default=(), compare=False)

    @property
    def preferences(self) -> PreferenceKind:
        """Which preferences its documents are, empty where they are none."""
        return _PREFERENCE_KINDS.get(self.record_kind, "")

    @property
    def templated(self) -> bool:
        """Whether a chat template renders its documents; what it gives is left as it is."""
        return self.record_kind in TEMPLATED_KINDS

    @property
    def ended(self) -> bool:
        """Whether its documents are given an end token, and BOS where models expect one."""
        return self.record_kind in ("text", "interleaved", "text-pairs")

    def parse_records(self, batch: Records) -> None:
        """Make documents of the rows of a stretch; those that cannot be used become bad records."""
        if self.record_reader is None:
            return
        values, records, offsets = batch.values, batch.records, batch.offsets
        batch.values, batch.records, batch.offsets = [], [], []
        for value, record, offset in zip(values, records, offsets, strict=True):
            try:
                document = self.record_reader(value)
            except UnusableRecordError as error:
                snippet = msgspec.json.encode(value, enc_hook=str)[:SNIPPET_BYTES]
                excerpt = snippet.decode("utf-8", "replace")
                batch.bad.append(BadRecord(record, offset, None, error.reason, excerpt))
                continue
            batch.values.append(document)
            batch.records.append(record)
            batch.offsets.append(offset)


@final
class RecordParsers:
    """The reading of every source of a job: a function of the source's first records and the recipe.

    Attributes:
        rules: how sources are cut, and text files read.

    Raises:
        SchemaError: the records of a source fit no schema.
        InputError: a source holds what cannot be prepared yet, or cannot be read.
    """

    def __init__(self, recipe: Recipe, limits: ReadLimits) -> None:
        self.rules = recipe.reading.rules(limits)
        self._text, self._rows = RecordParser(self.rules), replace(self.rules, text_field=None)
        self._recipe = recipe
        self._parsers_by_path: dict[str, RecordParser] = {}
        # Of texts very many lie in a folder, one behind the other, and none is remembered by itself.
        self._folder: tuple[str, MediaByStem, MediaInspector | None] | None = None
        # Of very many files most hold the same columns.
        self._parsers_by_shape: dict[tuple[int, RecordShape], RecordParser] = {}

    def get_parser(self, source: Source) -> RecordParser:
        """How this source is read; its first records are looked at once."""
        if source.kind in _TEXT_KINDS:
            return self._caption_parser(source) or self._text
        record_parser = self._parsers_by_path.get(source.path)
        if record_parser is None:
            record_parser = self._parsers_by_path[source.path] = self._detect(source)
        return record_parser

    def get_preference_kind(self, source: Source) -> PreferenceKind | None:
        """Which preferences a source holds, empty for none; None for one without any record."""
        record_parser = self.get_parser(source)
        return record_parser.preferences if record_parser.detected or source.kind in _TEXT_KINDS else None

    def _detect(self, source: Source) -> RecordParser:
        field, mapping = self._recipe.columns(source.input)
        is_tar = source.kind == "webdataset"
        inspector = self._make_media_checker(source, own_folder=is_tar)
        if field is not None and inspector is None:
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
            # Of a source without any record no column need be the text. Where more may come, reading it
            # as text says of each record what is wrong with it, until there are too many.
            return RecordParser(replace(self.rules, text_field=None if is_complete else "text"))
        shape = compute_record_shape(rows)
        # Where media lie is a matter of where their file does.
        key = None if shape is None or inspector else (source.input, shape)
        if key is not None and key in self._parsers_by_shape:
            return self._parsers_by_shape[key]
        try:
            ignore = (*self._recipe.reading.ignore, *self._recipe.source(source.input).ignore)
            schema = _detect_schema(source, rows, mapping, ignore, inspector)
            record_parser = make_record_parser(source, rows, self.rules, schema, self._recipe.chat, inspector)
        except SchemaError as error:
            location = self._recipe.source(source.input).location
            if not location:
                raise
            # A manifest says with mapping: and text_field: what options say.
            message = f"{location}: {error} (mapping: there)"
            raise SchemaError(message, error.columns, error.suggestion) from None
        record_parser = replace(
            record_parser,
            unused_columns=unused_columns(rows, schema),
            unused_keys=unused_message_keys(rows, schema),
        )
        if is_file_table and record_parser.record_reader is not None:
            record_parser = replace(record_parser, record_reader=_wrap_file_rows(record_parser.record_reader))
        if is_tar:
            record_parser = replace(record_parser, own_folder=True)
        if key is not None and len(self._parsers_by_shape) < _MAX_CACHED_SCHEMAS:
            self._parsers_by_shape[key] = record_parser
        return record_parser

    def _caption_parser(self, source: Source) -> RecordParser | None:
        """How a text is read that is the caption of media beside it; None for any other."""
        if self._recipe.reading.media is None or not is_possible_caption(source, self.rules.limits):
            return None
        folder = _parent_folder(source)
        if self._folder is None or self._folder[0] != folder:
            self._folder = (
                folder,
                list_media_by_stem(folder),
                self._make_media_checker(source, own_folder=True),
            )
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
        """Where paths of media begin that a source names; None where media are not read."""
        media = self._recipe.reading.media
        own = media is not None and self.get_parser(source).own_folder
        return None if media is None else _choose_media_folder(media, source, own_folder=own)

    @property
    def reads_media(self) -> bool:
        """Whether media are read."""
        return self._recipe.reading.media is not None

    @property
    def media_limits(self) -> MediaLimits:
        """What of media is refused for its size."""
        media = self._recipe.reading.media
        return MediaLimits() if media is None else media.limits

    def _make_media_checker(self, source: Source, *, own_folder: bool = False) -> MediaInspector | None:
        """What looks at the media of a source; None where media are not read."""
        media = self._recipe.reading.media
        if media is None:
            return None
        kinds = open_job_processor(media, self._recipe.tokenizer).families
        resolver = MediaResolver(
            _choose_media_folder(media, source, own_folder=own_folder),
            media.limits,
            # Media inside of a tar lie where the tar itself does; the Hub's cache is made of links.
            follow_links=own_folder or bool(source.revision) or self._recipe.follow_links,
        )
        return MediaInspector(resolver, kinds, media.sampling, embed=media.keep == "embed")


def _choose_media_folder(media: MediaRecipe, source: Source, *, own_folder: bool) -> str:
    data_folder = None if own_folder else media.data_folder
    return data_folder or _parent_folder(source)


def _parent_folder(source: Source) -> str:
    return source.path.rpartition("/")[0] or "."


def _add_files_to_rows(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows of a table that names files, as far as they can be used."""
    for row in rows:
        with contextlib.suppress(UnusableRecordError):
            yield dict(add_file_columns(row))


def _wrap_file_rows(record_reader: RecordReader) -> RecordReader:
    """A reader of rows of a table that names files."""
    return lambda row: record_reader(add_file_columns(row))


def describe_preferences(kind: str) -> str:
    """What documents of a kind of preferences are called; of none, too."""
    return _PREFERENCE_LABELS[kind]


def check_no_mixed_preferences(sources: Sequence[Source], record_parsers: RecordParsers) -> None:
    """Preferences stand alone: what reads a store of them reads nothing else, and the other way round.

    Raises:
        InputError: names the first source of each kind.
    """
    first: dict[str, str] = {}
    for source in sources:
        if (kind := record_parsers.get_preference_kind(source)) is not None:
            first.setdefault(kind, source.name)
    if len(first) > 1:
        contents = " and ".join(f"{_PREFERENCE_LABELS[kind]} ({name})" for kind, name in first.items())
        raise InputError(
            f"The inputs hold {contents}: a store holds preferences of one kind and nothing else. Prepare them into "
            "stores of their own."
        )


def _detect_schema(
    source: Source,
    rows: Sequence[Mapping[str, Any]],
    mapping: Mapping[str, str],
    ignore: Sequence[str],
    inspector: MediaInspector | None,
) -> Schema:
    """Detect the schema of a source from its first records."""
    try:
        return detect_schema(rows, mapping, media=inspector is not None, ignore=ignore)
    except SchemaError as error:
        raise SchemaError(f"{source.name}: {error}", error.columns, error.suggestion) from None


def make_record_parser(
    source: Source,
    rows: Sequence[Mapping[str, Any]],
    rules: ReadRules,
    schema: Schema,
    chat: ChatRecipe,
    inspector: MediaInspector | None = None,
) -> RecordParser:
    """How a source with these first records is read; with a looker its documents may hold media."""
    columns = _find_filled_columns(schema, rows)
    if inspector is not None and schema.kind == "interleaved":
        record_reader, rules = (
            _wrap_check_media(make_record_reader(schema), inspector),
            replace(rules, text_field=None),
        )
        return RecordParser(rules, "interleaved", record_reader, detected=schema.description, columns=columns)
    text_column = _find_text_column(schema, rows)
    if inspector is not None and schema.kind != "conversation":
        rules = replace(rules, text_field=None)
        if schema.kind == "preference":
            record_parser = _make_preference_parser(source, rows, rules, schema, chat)
            return replace(
                record_parser,
                record_reader=record_parser.record_reader
                and _wrap_refuse_media(record_parser.record_reader, _PREFERENCE_MEDIA),
            )
        record_kind: RecordKind = "text" if schema.kind == "text" else "tokens"
        record_reader = _wrap_refuse_media(make_record_reader(schema), _LATE_MEDIA)
        return RecordParser(rules, record_kind, record_reader, detected=schema.description, columns=columns)
    if text_column is not None:
        rules = replace(rules, text_field=text_column)
        return RecordParser(rules, detected=schema.description, columns=columns)
    rules = replace(rules, text_field=None)
    if schema.kind == "preference":
        return _make_preference_parser(source, rows, rules, schema, chat)
    record_kind = "text" if schema.kind == "text" else "tokens"
    if schema.kind != "conversation":
        record_reader = make_record_reader(schema)
        return RecordParser(rules, record_kind, record_reader, detected=schema.description, columns=columns)
    record_reader = make_record_reader(schema, media=inspector is not None)
    return RecordParser(
        rules,
        "conversation",
        record_reader if inspector is None else _wrap_check_media(record_reader, inspector),
        chat.rules(completion=schema.form == "prompt-completion"),
        schema.description,
        columns,
    )


def _wrap_refuse_media(record_reader: RecordReader, reason: str) -> RecordReader:
    """A reader that refuses records with media, where these are not read, and says why."""

    def refused(row: Mapping[str, Any]) -> ParsedRecord:
        for name in _MEDIA_COLUMNS:
            if is_non_empty(row.get(name)):
                raise UnusableRecordError(f"column {name!r} is not empty, and {reason}")
        return record_reader(row)

    return refused


_LATE_MEDIA = (
    "the first records of the file have none: keep records with images or audio in a file of their own, or leave the "
    "column out"
)
_PREFERENCE_MEDIA = "images and audio of preferences are not read yet: write conversations, or leave the column out"
_MEDIA_COLUMNS = ("images", "image", "audios", "audio", "videos", "video")


def _wrap_check_media(record_reader: RecordReader, inspector: MediaInspector) -> RecordReader:
    """A reader of conversations, or of texts with media, that looks at their media."""

    def looked(row: Mapping[str, Any]) -> ParsedRecord:
        record = record_reader(row)
        if isinstance(record, Conversation | InterleavedText) and record.media:
            return replace_media_with_frames(record, inspector(record.media))
        return record

    return looked


def _make_preference_parser(
    source: Source,
    rows: Sequence[Mapping[str, Any]],
    rules: ReadRules,
    schema: Schema,
    chat: ChatRecipe,
) -> RecordParser:
    """How a source of preferences is read."""
    if chat.train_on not in (None, "completion"):
        raise InputError(
            f"{source.name} holds preferences ({schema.description}), of which the answer is trained and nothing else: "
            f"leave --train-on {chat.train_on} out"
        )
    record_reader = make_record_reader(schema)
    record_kind: RecordKind = "labels"
    if schema.form == "pair":
        column = schema.columns["chosen"][0]
        first = next((v for row in rows if (v := get_column_value(row, column)) is not None), None)
        is_text = "prompt" not in schema.columns and isinstance(parse_messages(first), str)
        record_reader, record_kind = (
            _wrap_same_kind(record_reader, is_text=is_text),
            "text-pairs" if is_text else "pairs",
        )
    chat_rules = chat.rules(completion=True)
    return RecordParser(
        rules,
        record_kind,
        record_reader,
        chat_rules,
        schema.description,
        _find_filled_columns(schema, rows),
    )


def _wrap_same_kind(record_reader: RecordReader, *, is_text: bool) -> RecordReader:
    """A reader of pairs that are all texts, or all conversations, as the first of the source is."""

    def alike(row: Mapping[str, Any]) -> ParsedRecord:
        pair = record_reader(row)
        if isinstance(pair, PreferencePair) and isinstance(pair.chosen, str) is not is_text:
            actual_kind, expected_kind = ("texts", "messages")[:: -1 if is_text else 1]
            raise UnusableRecordError(
                f"its answers are {actual_kind} where those of the first records are {expected_kind}: write them "
                "alike, or keep "
                "them in files of their own"
            )
        return pair

    return alike


def read_sample_rows(source: Source, rules: ReadRules) -> tuple[list[dict[str, Any]], bool]:
    """The first records of a source as whole rows, at most 100; and whether it was read to its end.

    They are looked for in its first 8 MiB, and, where these hold none, in its first 64 MiB.
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


def iter_texts(value: object) -> Iterator[str]:
    """The texts of a document, as a tokenizer learns from them."""
    if isinstance(value, str):
        yield value
    if isinstance(value, PreferencePair):
        yield from iter_texts(value.chosen)
        yield from iter_texts(value.rejected)
    if isinstance(value, InterleavedText):
        yield from value.texts
    if isinstance(value, LabelledConversation):
        value = value.conversation
    messages = getattr(value, "messages", ())
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from (part["text"] for part in content if "text" in part)


def _find_filled_columns(schema: Schema, rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """For each role the columns in which these records have something."""
    columns_by_role = {
        role: tuple(name for name in names if any(is_non_empty(get_column_value(r, name)) for r in rows))
        for role, names in schema.columns.items()
    }
    return {role: names for role, names in columns_by_role.items() if names}


def _find_text_column(schema: Schema, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The column that alone is the text, where it is one of that very name: read the fast way."""
    if schema.form != "text":
        return None
    (column,) = schema.columns["text"]
    return column if any(column in row for row in rows) else None
