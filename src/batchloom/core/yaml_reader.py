"""YAML as plain values: nothing is run, and whatever is written, time and memory are bounded."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import yaml
from yaml.constructor import SafeConstructor
from yaml.nodes import ScalarNode
from yaml.resolver import Resolver

from batchloom.core.errors import InputError, InputMissingError, RecordError
from batchloom.core.files import describe_missing_path, describe_os_error, open_regular_file
from batchloom.core.settings import quote_value

# A hundred thousand data sets are some ten million bytes.
_MAX_BYTES = 32 << 20
# Of all values, those behind aliases counted each time they are used.
_MAX_VALUES = 4_000_000
_MAX_DEPTH = 64
_TAG = "tag:yaml.org,2002:"
_LIST_REMEDY = "write datasets: and a list into it"
_SCALAR_TAGS = {f"{_TAG}{name}" for name in ("str", "int", "float", "bool", "null")}
_COLLECTION_TAGS = {f"{_TAG}map", f"{_TAG}seq"}
# YAML 1.1 asks for a point, which nobody writes.
FLOAT_TAG = f"{_TAG}float"
EXPONENT_PATTERN = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+\Z")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path, remedy: str = _LIST_REMEDY) -> Any:
    """What a YAML file holds: dicts with text keys, lists, texts, numbers, True, False and None.

    Dates stay text. Anchors, aliases and merge keys are followed. A file whose name ends in ``.json``
    is read as JSON.

    Args:
        path: the file.
        remedy: what to do about an empty one.

    Raises:
        InputMissingError: there is no such file, or nothing in it.
        RecordError: it is no YAML, or holds what is not read: two equal keys, a tag, an alias to
            itself, too many values; says at which line and column.
        InputError: it cannot be read.
    """
    try:
        with open_regular_file(path) as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        remedy = "name a YAML file that exists"
        raise InputMissingError(describe_missing_path(str(path), remedy)) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {describe_os_error(error)}.") from error
    return parse_yaml(data, str(path), remedy)


def parse_yaml(data: bytes, name: str, remedy: str = _LIST_REMEDY) -> Any:
    """The same of bytes; ``name`` is what messages call them."""
    if len(data) > _MAX_BYTES:
        raise InputError(
            f"{name} has more than {_MAX_BYTES >> 20} MiB, which no list of data sets needs; name a folder or a "
            "glob in place of its files."
        )
    if name.lower().endswith(".json") and data.strip():
        return _parse_json(_decode_text(data, name), name)
    builder = _YamlBuilder(name)
    try:
        for event in yaml.parse(_decode_text(data, name), Loader=_LOADER):
            builder.take(event)
    except yaml.reader.ReaderError as error:
        raise RecordError(
            name,
            None,
            None,
            f"holds a control character (code {error.character}); write YAML as text",
        ) from None
    except yaml.MarkedYAMLError as error:
        raise _make_yaml_error(name, error.problem_mark or error.context_mark, _describe_yaml_error(error)) from None
    if not builder.documents:
        raise InputMissingError(f"{name} is empty; {remedy}.")
    return builder.documents[0]


def _parse_json(text: str, name: str) -> Any:
    """JSON, which need not be YAML: tabs, and characters in two halves."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            duplicate_key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise RecordError(
                name,
                None,
                None,
                f"the key {quote_value(duplicate_key)} is there twice; leave one of the two out",
            )
        return mapping

    try:
        value = json.loads(text, object_pairs_hook=once)
        # Half a character is no text.
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        reason = f"not valid JSON: {error.msg}"
        raise RecordError(name, error.lineno, error.colno, reason) from None
    except (RecursionError, ValueError) as error:
        raise RecordError(name, None, None, f"cannot be read as JSON: {error}") from None
    return value


def _decode_text(data: bytes, name: str) -> str:
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise RecordError(
            name,
            None,
            None,
            f"is no text: it is not UTF-8 at byte {error.start}; write YAML as text",
        ) from None


def _describe_yaml_error(error: yaml.MarkedYAMLError) -> str:
    context = f" ({error.context})" if error.context else ""
    return f"not valid YAML: {error.problem}{context}"


def _make_yaml_error(name: str, mark: Any, reason: str) -> RecordError:
    line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
    return RecordError(name, line, column, reason)


@dataclass(slots=True)
class _OpenCollection:
    """A list or mapping that is not closed yet: how many values are in it, how deep they lie."""

    value: list[Any] | dict[str, Any]
    anchor: str | None
    size: int = 1
    depth: int = 1
    key: str | None = None
    merged: list[dict[str, Any]] = field(default_factory=list)


@final
class _YamlBuilder:
    """Makes values of the events of a parser, without calling itself."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: list[_OpenCollection] = []
        self._anchors: dict[str, tuple[Any, int, int]] = {}
        self._size = 0
        self._resolver, self._constructor = Resolver(), SafeConstructor()
        self.documents: list[Any] = []

    def take(self, event: yaml.Event) -> None:
        """Take the next event."""
        if isinstance(event, yaml.ScalarEvent):
            if self._waits_for_key():
                self._take_key(event)
            else:
                self._add((self._scalar(event), 1, 0), event, event.anchor)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._begin(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._end(event)
        elif isinstance(event, yaml.AliasEvent):
            self._take_alias(event)
        elif isinstance(event, yaml.DocumentStartEvent) and self.documents:
            raise self._fault(event, "a second document begins here; write one file for each")

    def _waits_for_key(self) -> bool:
        return bool(self._open) and isinstance(self._open[-1].value, dict) and self._open[-1].key is None

    def _take_key(self, event: yaml.ScalarEvent) -> None:
        self._check_tag(event, _SCALAR_TAGS)
        top = self._open[-1]
        if event.value in top.value:
            raise self._fault(
                event,
                f"the key {quote_value(event.value)} is there already; leave one of the two out",
            )
        top.key = event.value

    def _take_alias(self, event: yaml.AliasEvent) -> None:
        if self._waits_for_key():
            raise self._fault(event, f"the alias *{event.anchor} stands for a key; write the key out")
        if event.anchor not in self._anchors:
            raise self._fault(event, f"the alias *{event.anchor} has no anchor before it, or lies inside of it")
        sized_value = self._anchors[event.anchor]
        self._check_depth(sized_value[2], event)
        self._add(sized_value, event, None)

    def _begin(self, event: yaml.CollectionStartEvent) -> None:
        if self._waits_for_key():
            raise self._fault(event, "a list or mapping stands for a key; write a word")
        self._check_tag(event, _COLLECTION_TAGS)
        if len(self._open) >= _MAX_DEPTH:
            raise self._fault(event, f"more than {_MAX_DEPTH} lists and mappings lie in one another")
        value: list[Any] | dict[str, Any] = [] if isinstance(event, yaml.SequenceStartEvent) else {}
        self._open.append(_OpenCollection(value, event.anchor))

    def _end(self, event: yaml.CollectionEndEvent) -> None:
        collection = self._open.pop()
        if isinstance(collection.value, dict):
            # Of several the first counts most.
            for merged in collection.merged:
                for key, value in merged.items():
                    collection.value.setdefault(key, value)
        self._add((collection.value, collection.size, collection.depth), event, collection.anchor)

    def _add(self, sized_value: tuple[Any, int, int], event: yaml.Event, anchor: str | None) -> None:
        """Put a finished value, with its size and depth, where it belongs."""
        value, size, depth = sized_value
        if anchor is not None:
            self._anchors[anchor] = sized_value
        self._size += size if isinstance(event, yaml.AliasEvent) else 1
        if self._size > _MAX_VALUES:
            raise self._fault(event, f"more than {_MAX_VALUES:,} values, aliases followed; write fewer")
        if not self._open:
            self.documents.append(value)
            return
        top = self._open[-1]
        top.size, top.depth = top.size + size, max(top.depth, depth + 1)
        if isinstance(top.value, list):
            top.value.append(value)
        elif top.key == "<<":
            top.merged += list(self._merges(value, event))
            top.key = None
        elif top.key is not None:
            top.value[top.key], top.key = value, None

    def _check_depth(self, more: int, event: yaml.Event) -> None:
        if len(self._open) + more > _MAX_DEPTH:
            raise self._fault(event, f"more than {_MAX_DEPTH} lists and mappings lie in one another")

    def _merges(self, value: Any, event: yaml.Event) -> Iterator[dict[str, Any]]:
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict):
                raise self._fault(event, "<< merges mappings, and this is none")
            yield item

    def _scalar(self, event: yaml.ScalarEvent) -> Any:
        self._check_tag(event, _SCALAR_TAGS)
        tag = None if event.tag == "!" else event.tag
        if tag is None:
            if not event.implicit[0]:
                return event.value
            tag = self._resolver.resolve(ScalarNode, event.value, (True, False))
            if EXPONENT_PATTERN.fullmatch(event.value):
                tag = FLOAT_TAG
        if tag not in _SCALAR_TAGS or tag == f"{_TAG}str":
            return event.value
        make = getattr(self._constructor, f"construct_yaml_{tag.removeprefix(_TAG)}")
        try:
            return make(ScalarNode(tag, event.value))
        except (ValueError, KeyError):
            kind = tag.removeprefix(_TAG)
            raise self._fault(event, f"{quote_value(event.value)} cannot be read as {kind}; quote it") from None

    def _check_tag(self, event: Any, allowed_tags: set[str]) -> None:
        if event.tag not in (None, "!") and event.tag not in allowed_tags:
            raise self._fault(
                event,
                f"the tag {quote_value(event.tag)} is not read, only plain lists, mappings, texts and numbers",
            )

    def _fault(self, event: yaml.Event, reason: str) -> RecordError:
        return _make_yaml_error(self._name, event.start_mark, reason)
