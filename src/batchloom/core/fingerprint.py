"""Fingerprints: 128-bit hashes of plain values, equal wherever the values are equal."""

import hashlib
import json
from collections.abc import Iterable, Mapping

import orjson

# What both writers spell alike: floats are not among it.
_ORJSON_SAFE_TYPES = {str, int, bool, type(None)}


def encode_canonical(value: object) -> bytes:
    """The one JSON spelling of a plain value: sorted keys, no spaces, UTF-8."""
    if _is_orjson_safe([value]):
        try:
            return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        except orjson.JSONEncodeError:
            # Integers beyond 64 bits, keys that are no text: what follows knows them, or says what is wrong.
            pass
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _is_orjson_safe(values: Iterable[object]) -> bool:
    """Whether the faster writer spells all of these as the one that decides does; a vocabulary is large."""
    values = list(values)
    kinds = set(map(type, values)) - _ORJSON_SAFE_TYPES
    if not kinds <= {dict, list, tuple}:
        return False
    for value in values if kinds else ():
        if isinstance(value, dict):
            if not _is_orjson_safe(value.values()):
                return False
        elif isinstance(value, (list, tuple)) and not _is_orjson_safe(value):
            return False
    return True


def fingerprint(value: object) -> str:
    """32 hex digits that name a plain value (BLAKE2b-128 of its canonical JSON)."""
    return hashlib.blake2b(encode_canonical(value), digest_size=16).hexdigest()


def find_broken_link(first: object, entries: Iterable[Mapping[str, object]]) -> int | None:
    """Number of the first entry of a chain that was changed after it was written; None where none was.

    Each entry has its ``fingerprint``: that of the one before it (at first of ``first``) and of its other fields.
    """
    name: object = fingerprint(first)
    for number, entry in enumerate(entries):
        fields = {key: value for key, value in entry.items() if key != "fingerprint"}
        name = fingerprint([name, fields])
        if entry.get("fingerprint") != name:
            return number
    return None


def derive_key(*parts: str | int) -> tuple[int, int]:
    """A 128-bit key for a purpose, as two 64-bit halves.

    Keys come from hashing all their parts together, never from adding them, so that
    (seed 1, epoch 2) and (seed 2, epoch 1) share nothing.
    """
    digest = hashlib.blake2b(encode_canonical(list(parts)), digest_size=16, person=b"batchloom.key").digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
