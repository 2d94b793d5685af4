r"""The ``.mask`` file: one bit per token of a shard, set if the token is trained.

Layout (little-endian): 8 bytes ``BLMMASK\0``; u64 version 1; u64 tokens T; u64 number of
trained tokens; then ceil(T / 8) bytes. Token i is bit i mod 8 (lowest bit first) of byte
i div 8, 1 if it is trained; unused bits of the last byte are 0. A shard without the file
is fully trained.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.store.format.file_header import CHECK_REMEDY, HEADER, read_header
from batchloom.store.format.megatron_index import map_file

MAGIC = b"BLMMASK\x00"


@final
class MaskBuilder:
    """Incremental bit mask of a shard.

    Attributes:
        tokens: number of tokens added.
        trained: number of those that are trained.
    """

    def __init__(self) -> None:
        self.tokens = self.trained = 0
        self._bits = bytearray()
        self._pending_flags = np.zeros(0, bool)

    def append(self, trained: NDArray[np.bool_]) -> None:
        """Add the flags of the next tokens, bool [n]."""
        self.tokens += trained.size
        self.trained += int(np.count_nonzero(trained))
        pending_flags = np.concatenate([self._pending_flags, trained])
        aligned_count = pending_flags.size // 8 * 8
        self._bits += np.packbits(pending_flags[:aligned_count], bitorder="little").tobytes()
        self._pending_flags = pending_flags[aligned_count:]

    def to_bytes(self) -> bytes | None:
        """Return the complete ``.mask`` file, or None if every token is trained."""
        if self.trained == self.tokens:
            return None
        header = HEADER.pack(MAGIC, 1, self.tokens, self.trained)
        return header + self._bits + np.packbits(self._pending_flags, bitorder="little").tobytes()


def iter_mask_chunks(tokens: int, trained: int, flags: Iterable[NDArray[np.bool_]]) -> Iterator[bytes]:
    """Yield the bytes of a ``.mask`` file in bounded chunks, given its counts.

    Args:
        tokens: number of tokens.
        trained: number of trained tokens.
        flags: chunks of the trained flags, in token order.
    """
    yield HEADER.pack(MAGIC, 1, tokens, trained)
    pending_flags = np.zeros(0, bool)
    for chunk in flags:
        buffered_flags = np.concatenate([pending_flags, chunk])
        aligned_count = buffered_flags.size // 8 * 8
        yield np.packbits(buffered_flags[:aligned_count], bitorder="little").tobytes()
        pending_flags = buffered_flags[aligned_count:]
    yield np.packbits(pending_flags, bitorder="little").tobytes()


@final
class LossMask:
    """A mapped ``.mask`` file.

    Attributes:
        tokens: tokens of the shard.
        trained: number of trained tokens according to the header.
        bits: view of the file with eight tokens per byte, uint8 [ceil(tokens / 8)].
    """

    __slots__ = ("bits", "tokens", "trained")

    def __init__(self, tokens: int, trained: int, bits: NDArray[np.uint8]) -> None:
        self.tokens, self.trained, self.bits = tokens, trained, bits

    def slice(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return the trained flags of tokens ``start`` to ``stop - 1``, bool."""
        first = start >> 3
        unpacked_bits = np.unpackbits(self.bits[first : (stop + 7) >> 3], bitorder="little")
        return unpacked_bits[start - 8 * first : stop - 8 * first].view(np.bool_)

    def count(self) -> int:
        """Return the number of set bits, including those beyond the last token."""
        return int(np.bitwise_count(self.bits).sum(dtype=np.int64))


def map_mask(path: Path, tokens: int) -> LossMask:
    """Map the ``.mask`` file of a shard of ``tokens`` tokens.

    Raises:
        StoreError: the file is missing, of another type or version, or has another number of tokens.
    """
    return parse_mask(map_file(path), path, tokens)


def parse_mask(view: memoryview, path: Path, tokens: int) -> LossMask:
    """Parse the content of a ``.mask`` file; see :func:`map_mask`."""
    header_tokens, trained = read_header(view, path, MAGIC)
    if header_tokens != tokens or len(view) != HEADER.size + (tokens + 7) // 8:
        raise StoreError(
            f"{path} declares {header_tokens:,} tokens in {len(view):,} bytes; its shard has {tokens:,}. {CHECK_REMEDY}"
        )
    return LossMask(tokens, trained, np.frombuffer(view, np.uint8, offset=HEADER.size))
