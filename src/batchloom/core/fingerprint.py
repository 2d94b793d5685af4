"""Fingerprints: 128-bit hashes of plain values, equal for equal values."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import orjson

# Types that both writers encode the same; floats are not among them.
_CONTAINERS = {dict, list, tuple}
_ORJSON_SAFE_TYPES = {str, int, bool, type(None), *_CONTAINERS}


def encode_canonical(value: object) -> bytes:
    """Return the canonical JSON of a plain value: sorted keys, no spaces, UTF-8."""
    if _is_orjson_safe(value):
        try:
            return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        except orjson.JSONEncodeError:
            # Integers beyond 64 bits and keys that are not text: json encodes them or reports the error.
            pass
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _is_orjson_safe(value: object) -> bool:
    """Return whether orjson encodes this value exactly as json does.

    orjson is faster, which matters for a vocabulary. The values are read level by level: a vocabulary has 50,000
    lists of merges.
    """
    level: list[Any] = [value]
    while (kinds := set(map(type, level))) & _CONTAINERS:
        if not kinds <= _ORJSON_SAFE_TYPES:
            return False
        containers = [value for value in level if type(value) in _CONTAINERS]
        level = list(chain.from_iterable(part.values() if isinstance(part, dict) else part for part in containers))
    return kinds <= _ORJSON_SAFE_TYPES


def fingerprint(value: object) -> str:
    """Return 32 hex digits for a plain value (BLAKE2b-128 of its canonical JSON)."""
    return hashlib.blake2b(encode_canonical(value), digest_size=16).hexdigest()


def find_broken_link(first: object, entries: Iterable[Mapping[str, object]]) -> int | None:
    """Return the index of the first modified entry of a hash chain; None if all match.

    The ``fingerprint`` of an entry covers that of the previous one (initially of ``first``) and its other fields.
    """
    name: object = fingerprint(first)
    for number, entry in enumerate(entries):
        fields = {key: value for key, value in entry.items() if key != "fingerprint"}
        name = fingerprint([name, fields])
        if entry.get("fingerprint") != name:
            return number
    return None


def derive_key(*parts: str | int) -> tuple[int, int]:
    """Derive a 128-bit key for a purpose, as two 64-bit halves.

    All parts are hashed together, never added, so that (seed 1, epoch 2) and (seed 2, epoch 1) are independent.
    """
    digest = hashlib.blake2b(encode_canonical(list(parts)), digest_size=16, person=b"batchloom.key").digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
