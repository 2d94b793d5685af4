"""Web archives: the documents of WARC and WET files (ISO 28500).

A document is the text of a response (HTML becomes its visible text) or of a conversion, which WET files hold. A record
is bad if its length does not lead to the next one; the reader continues at the next header.
"""

import re
from collections.abc import Iterator
from functools import cache, partial
from io import BytesIO
from typing import Any, Final, NamedTuple, final

from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import MissingDependencyError
from batchloom.sources.files.file_opening import ENCODING_BY_MARK
from batchloom.sources.files.part_stream import PartStream, ReadRules
from batchloom.sources.formats.record_faults import describe_missing_field, excerpt_record, make_too_large_record
from batchloom.text import CleanFunction, DroppedText, HtmlSettings, make_html_step

WARC_MAGIC: Final = b"WARC/"
_CHUNK_BYTES = 1 << 20
_MAX_HEADER_BYTES = 256 << 10
_BATCH_RECORDS = 256
_HEADER_END = re.compile(rb"\r?\n\r?\n")
_NEXT_RECORD = re.compile(rb"\n(?=WARC/[01]\.)")
_LINE_ENDS = re.compile(rb"[\r\n]*")
_CONTENT_LENGTH = re.compile(rb"^content-length:[ \t]*(\d{1,18})[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
# An alias of gzip that fastwarc does not know. The replacement has the same length, which the record states.
_GZIP_ALIAS = re.compile(rb"^(content-encoding:[ \t]*)x-gzip(?=[ \t]*\r?$)", re.IGNORECASE | re.MULTILINE)
_FIELD = re.compile(rb"^([\w-]+):[ \t]*(.*?)[ \t]*\r?$", re.MULTILINE)
_HTML_TYPES = ("text/html", "application/xhtml+xml")
_SUPERSETS = {"gbk": "gb18030", "euc_kr": "cp949", "shift_jis": "cp932", "big5": "big5hkscs"}
_TEXT_TYPES = (*_HTML_TYPES, "text/plain")
_INSTALL = "pip install 'batchloom[clean]'"


class _WarcRecord(NamedTuple):
    """One record: its offset, its fields in lower case, and all its bytes."""

    offset: int
    fields: dict[str, str]
    data: bytes
    body: int  # offset of the body in the bytes


def read_warc(stream: PartStream, rules: ReadRules) -> Iterator[Records]:
    """Yield the documents of a web archive in batches."""
    reader = _WarcReader(stream, rules)
    batch = Records()
    for item in reader.read():
        number = reader.count - 1
        batch.records_read += 1
        if isinstance(item, str):
            batch.left_out[item] = batch.left_out.get(item, 0) + 1
        elif isinstance(item, BadRecord):
            batch.bad.append(item)
        else:
            offset, row = item
            batch.add(number, offset, _take_field(row, number, offset, rules))
            batch.columns[number] = {name: value or None for name, value in row.items() if name != "text"}
        if batch.records_read == _BATCH_RECORDS:
            yield batch
            batch = Records()
    if batch.records_read:
        yield batch


def _take_field(row: dict[str, str], number: int, offset: int, rules: ReadRules) -> Any:
    if rules.text_field is None:
        return row
    if rules.text_field in row:
        return row[rules.text_field]
    return BadRecord(number, offset, None, describe_missing_field(rules.text_field, list(row)), "")


@final
class _WarcReader:
    """Reader of records, front to back.

    Attributes:
        count: number of records read so far.
    """

    def __init__(self, stream: PartStream, rules: ReadRules) -> None:
        self._stream = stream
        self._max_bytes = rules.limits.record_bytes
        # The window, the offset of its first byte in the source, and the position in it.
        self._data = b""
        self._offset = stream.position
        self._at = 0
        self.count = 0

    def read(self) -> Iterator[tuple[int, dict[str, str]] | BadRecord | str]:
        """Yield offset and row of a document, a bad record, or why it is left out."""
        while self._skip_line_ends():
            self.count += 1
            record = self._read_record()
            yield record if isinstance(record, BadRecord) else self._make_document(record)

    def _make_document(self, record: _WarcRecord) -> tuple[int, dict[str, str]] | BadRecord | str:
        kind = record.fields.get("warc-type", "")
        try:
            if kind == "conversion":
                text: str | DroppedText = record.data[record.body :].decode()
            elif kind == "response":
                text = _read_response(record.data)
            else:
                return f"{kind or 'unnamed'} records of web archives"
        except UnicodeDecodeError as error:
            byte = f"byte 0x{error.object[error.start]:02x} of the conversion is not valid UTF-8"
            return self._make_bad(record.offset, record.data, byte)
        except OSError as error:
            return self._make_bad(record.offset, record.data, f"the response cannot be decoded ({error})")
        if isinstance(text, DroppedText):
            return text.reason
        row = {
            "text": text,
            # Old archives have it in angle brackets.
            "url": record.fields.get("warc-target-uri", "").removeprefix("<").removesuffix(">"),
            "date": record.fields.get("warc-date", ""),
        }
        return record.offset, row

    def _read_record(self) -> _WarcRecord | BadRecord:
        """Read the record that begins here."""
        while (end := _HEADER_END.search(self._data, self._at)) is None and self._remaining < _MAX_HEADER_BYTES:
            if not self._read_more():
                break
        header = self._data[self._at : end.start()] if end else b""
        length = _CONTENT_LENGTH.search(header) if header.startswith(WARC_MAGIC) else None
        if end is None or length is None:
            return self._resume("no header of a WARC record with its length")
        body = end.end() - self._at
        size = body + int(length[1])
        if size > self._max_bytes:
            start = self._data[self._at : self._at + _MAX_HEADER_BYTES]
            bad = make_too_large_record(self.count - 1, self._offset + self._at, start, self._max_bytes)
            self._skip(size)
            return bad
        while self._remaining < size and self._read_more():
            pass
        if self._remaining < size:
            return self._resume(f"the file ends before the {int(length[1]):,} bytes of the record")
        if not self._is_followed_by_record(size):
            return self._resume(f"no record follows its {int(length[1]):,} bytes")
        fields = {name.decode().lower(): value.decode("utf-8", "replace") for name, value in _FIELD.findall(header)}
        record = _WarcRecord(self._offset + self._at, fields, self._data[self._at : self._at + size], body)
        self._at += size
        return record

    @property
    def _remaining(self) -> int:
        return len(self._data) - self._at

    def _is_followed_by_record(self, size: int) -> bool:
        """Return whether a record or the end of the file follows these bytes."""
        at_end = False
        while True:
            found = _LINE_ENDS.match(self._data, self._at + size)
            next_at = found.end() if found else self._at + size
            if at_end or len(self._data) - next_at >= len(WARC_MAGIC):
                return next_at == len(self._data) or self._data.startswith(WARC_MAGIC, next_at)
            # The window moves.
            at_end = not self._read_more()

    def _resume(self, reason: str) -> BadRecord:
        """Return the bad record that begins here, and go to the next that is found."""
        bad = self._make_bad(self._offset + self._at, self._data[self._at : self._at + _MAX_HEADER_BYTES], reason)
        self._at += 1
        while (found := _NEXT_RECORD.search(self._data, self._at)) is None:
            # A record may begin at the end of the window.
            self._at = max(self._at, len(self._data) - 2 * len(WARC_MAGIC))
            if not self._read_more():
                self._at = len(self._data)
                return bad
        self._at = found.end()
        return bad

    def _make_bad(self, offset: int, data: bytes, reason: str) -> BadRecord:
        return BadRecord(self.count - 1, offset, None, f"{reason}; fetch the archive again", excerpt_record(data))

    def _skip_line_ends(self) -> bool:
        """Skip the line ends between records; return False at the end of the file."""
        while True:
            found = _LINE_ENDS.match(self._data, self._at)
            self._at = found.end() if found else self._at
            if self._remaining or not self._read_more():
                return bool(self._remaining)

    def _skip(self, size: int) -> None:
        """Skip bytes, also beyond the window."""
        while size > self._remaining:
            size -= self._remaining
            self._at = len(self._data)
            if not self._read_more():
                return
        self._at += size

    def _read_more(self) -> bool:
        data = self._stream.read(_CHUNK_BYTES)
        self._offset += self._at
        self._data = self._data[self._at :] + data
        self._at = 0
        return bool(data)


def _read_response(data: bytes) -> str | DroppedText:
    """Return the visible text of an HTTP response.

    Raises:
        OSError: its payload is not encoded as its headers say.
        MissingDependencyError: fastwarc or resiliparse is not installed.
    """
    iterate, map_label, detect, clean = _import_parsers()
    data = _GZIP_ALIAS.sub(rb"\1gzip  ", data, count=1)
    record = next(iter(iterate(BytesIO(data), parse_http=True, auto_decode="all", stream_detect=False)), None)
    if record is None:
        raise OSError("no HTTP response")
    kind = (record.http_content_type or "").lower()
    # Crawlers also keep responses of DNS.
    if not record.is_http or (kind and kind not in _TEXT_TYPES):
        return DroppedText("responses without text", kind)
    payload = record.reader.read()
    # A mark at its beginning decides, then the server, then the page. Web standards read labels as their supersets.
    encoding = next((name for mark, name in ENCODING_BY_MARK.items() if payload.startswith(mark)), None)
    if not kind and encoding is None and b"\0" in payload:
        return DroppedText("responses without text", "binary data")
    encoding = encoding or map_label(record.http_charset or "") or detect(payload)
    text = payload.decode(_SUPERSETS.get(encoding, encoding), "replace").removeprefix("\ufeff")
    return clean(text) if kind in _HTML_TYPES or not kind else text


@cache
def _import_parsers() -> tuple[Any, Any, Any, CleanFunction]:
    try:
        from fastwarc.warc import ArchiveIterator
        from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5
    except ImportError:
        raise MissingDependencyError(
            f"To read the responses of web archives, install resiliparse: {_INSTALL}"
        ) from None
    map_label = partial(map_encoding_to_html5, fallback_utf8=False)
    detect = partial(detect_encoding, html5_compatible=True, from_html_meta=True)
    return ArchiveIterator, map_label, detect, make_html_step(HtmlSettings())
