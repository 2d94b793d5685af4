"""Streams cut into blocks of complete records, in bounded memory."""

from collections.abc import Iterator
from dataclasses import dataclass

from batchloom.sources.files.part_stream import PartStream
from batchloom.sources.files.source_rules import ReadLimits
from batchloom.sources.formats.delimiters import Delimiter
from batchloom.sources.formats.record_faults import SNIPPET_BYTES

_MAX_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Consecutive complete records; the last one of a source may lack its delimiter.

    Attributes:
        offset: start of the block in the (decompressed) source.
        data: its bytes, or only the first few of an oversize record.
        oversize: whether it is one record above ``ReadLimits.record_bytes``.
    """

    offset: int
    data: bytes
    oversize: bool = False


def iter_record_blocks(stream: PartStream, delimiter: Delimiter, limits: ReadLimits) -> Iterator[RecordBlock]:
    """Yield blocks of complete records from a stream that begins at a record start.

    Memory holds at most a record of ``record_bytes`` and a chunk. Larger records are skipped and
    reported by their beginning.
    """
    offset, carry = stream.position, b""
    while True:
        data = stream.read(max(limits.chunk_bytes, min(len(carry), _MAX_BLOCK_BYTES)))
        if not data:
            if carry:
                yield RecordBlock(offset, carry)
            return
        carry += data
        end = delimiter.last_end(carry)
        if end:
            # A suspended generator keeps its locals alive, and a block may be very large.
            ready = [RecordBlock(offset, carry[:end])]
            carry, offset = carry[end:], offset + end
            yield ready.pop()
        if len(carry) > limits.record_bytes + _MAX_BLOCK_BYTES:
            start = carry[:SNIPPET_BYTES]
            carry = _skip_record(stream, delimiter, limits, carry)
            yield RecordBlock(offset, start, oversize=True)
            offset = stream.position - len(carry)


def _skip_record(stream: PartStream, delimiter: Delimiter, limits: ReadLimits, carry: bytes) -> bytes:
    """Skip the rest of a record and return the bytes read after its end."""
    while (end := delimiter.first_end(carry, final=False)) < 0:
        data = stream.read(limits.chunk_bytes)
        if not data:
            return b""
        carry = carry[len(carry) - delimiter.overlap(carry) :] + data
    return carry[end:]
