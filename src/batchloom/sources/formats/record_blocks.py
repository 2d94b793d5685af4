"""Streams cut into blocks of whole records, in bounded memory."""

from collections.abc import Iterator
from dataclasses import dataclass

from batchloom.sources.files import Limits, PartStream
from batchloom.sources.formats.delimiters import Delimiter
from batchloom.sources.formats.record_faults import SNIPPET_BYTES

_MOST_AT_ONCE = 8 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """Whole records back to back; the last one of a source may lack its delimiter.

    Attributes:
        offset: where the block begins in the (decompressed) source.
        data: its bytes; of a single oversize record, the first few only.
        oversize: whether it is one record above ``Limits.record_bytes``.
    """

    offset: int
    data: bytes
    oversize: bool = False


def record_blocks(stream: PartStream, delimiter: Delimiter, limits: Limits) -> Iterator[Block]:
    """Blocks of whole records from a stream that begins where a record begins.

    Holds at most a record of ``record_bytes`` and a chunk; what is larger is read through and
    reported by its beginning.
    """
    offset, carry = stream.position, b""
    while True:
        data = stream.read(max(limits.chunk_bytes, min(len(carry), _MOST_AT_ONCE)))
        if not data:
            if carry:
                yield Block(offset, carry)
            return
        carry += data
        end = delimiter.last_end(carry)
        if end:
            # A generator holds its names while it waits, and a block may be very large.
            ready = [Block(offset, carry[:end])]
            carry, offset = carry[end:], offset + end
            yield ready.pop()
        if len(carry) > limits.record_bytes + _MOST_AT_ONCE:
            start = carry[:SNIPPET_BYTES]
            carry = _after_record(stream, delimiter, limits, carry)
            yield Block(offset, start, oversize=True)
            offset = stream.position - len(carry)


def _after_record(stream: PartStream, delimiter: Delimiter, limits: Limits, carry: bytes) -> bytes:
    """Read through the rest of a record; what was read after its end."""
    while (end := delimiter.first_end(carry, final=False)) < 0:
        data = stream.read(limits.chunk_bytes)
        if not data:
            return b""
        carry = carry[len(carry) - delimiter.overlap(carry) :] + data
    return carry[end:]
