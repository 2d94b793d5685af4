r"""The ``.mask`` file: which tokens of a shard are trained, one bit a token.

Layout (little-endian): 8 bytes ``BLMMASK\0``; u64 version 1; u64 tokens T; u64 number of
trained tokens; then ceil(T / 8) bytes, token i in bit i mod 8 (the lowest first) of byte
i div 8, 1 where it is trained; what is left of the last byte is 0. A shard without the file
is trained as a whole.
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
    """The bits of a shard as its tokens come, packed.

    Attributes:
        tokens: tokens so far.
        trained: how many of them are trained.
    """

    def __init__(self) -> None:
        self.tokens = self.trained = 0
        self._bits = bytearray()
        self._pending_flags = np.zeros(0, bool)

    def append(self, trained: NDArray[np.bool_]) -> None:
        """Add the next tokens: for each whether it is trained [n]."""
        self.tokens += trained.size
        self.trained += int(np.count_nonzero(trained))
        pending_flags = np.concatenate([self._pending_flags, trained])
        aligned_count = pending_flags.size // 8 * 8
        self._bits += np.packbits(pending_flags[:aligned_count], bitorder="little").tobytes()
        self._pending_flags = pending_flags[aligned_count:]

    def to_bytes(self) -> bytes | None:
        """The whole ``.mask`` file; None where every token is trained, which needs none."""
        if self.trained == self.tokens:
            return None
        header = HEADER.pack(MAGIC, 1, self.tokens, self.trained)
        return header + self._bits + np.packbits(self._pending_flags, bitorder="little").tobytes()


def iter_mask_chunks(tokens: int, trained: int, flags: Iterable[NDArray[np.bool_]]) -> Iterator[bytes]:
    """The bytes of a ``.mask`` file whose counts are known, a bounded piece at a time.

    Args:
        tokens: tokens of the file.
        trained: how many of them are trained.
        flags: for the tokens in order whether each is trained, in pieces.
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
        trained: how many of them it says are trained.
        bits: eight tokens a byte, as a view of the file [ceil(tokens / 8)].
    """

    __slots__ = ("bits", "tokens", "trained")

    def __init__(self, tokens: int, trained: int, bits: NDArray[np.uint8]) -> None:
        self.tokens, self.trained, self.bits = tokens, trained, bits

    def slice(self, start: int, stop: int) -> NDArray[np.bool_]:
        """For tokens ``start`` to ``stop - 1`` whether each is trained [stop - start]."""
        first = start >> 3
        unpacked_bits = np.unpackbits(self.bits[first : (stop + 7) >> 3], bitorder="little")
        return unpacked_bits[start - 8 * first : stop - 8 * first].view(np.bool_)

    def count(self) -> int:
        """How many bits are set, those beyond the last token included."""
        return int(np.bitwise_count(self.bits).sum(dtype=np.int64))


def map_mask(path: Path, tokens: int) -> LossMask:
    """Map the ``.mask`` file of a shard of so many tokens.

    Raises:
        StoreError: the file is missing, of another kind or version, or not of so many tokens.
    """
    return parse_mask(map_file(path), path, tokens)


def parse_mask(view: memoryview, path: Path, tokens: int) -> LossMask:
    """The mask in the content of a ``.mask`` file, wherever it lies; else as :func:`map_mask`."""
    header_tokens, trained = read_header(view, path, MAGIC)
    if header_tokens != tokens or len(view) != HEADER.size + (tokens + 7) // 8:
        raise StoreError(
            f"{path} says {header_tokens:,} tokens in {len(view):,} bytes; its shard has {tokens:,}. {CHECK_REMEDY}"
        )
    return LossMask(tokens, trained, np.frombuffer(view, np.uint8, offset=HEADER.size))
