"""Read YAML files as plain values through PyYAML's SafeLoader."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, final

import yaml

from batchloom.core.errors import InputError, InputMissingError, RecordError
from batchloom.core.files import describe_missing_path, describe_os_error, open_regular_file
from batchloom.core.settings import quote_value

_MAX_BYTES = 32 << 20
# Values with every alias followed: a few lines of aliases to aliases can expand to billions.
_MAX_VALUES = 1_000_000
_MAX_DEPTH = 64
_TOO_DEEP = f"lists and mappings are nested more than {_MAX_DEPTH} deep"
_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = {f"{_TAG}{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq", "merge", "value")}
_LIST_REMEDY = "write datasets: and a list into it"
# YAML 1.1 reads 1e-3 as text, because it has no decimal point.
FLOAT_TAG = f"{_TAG}float"
EXPONENT_PATTERN = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+\Z")


def read_yaml(path: Path, remedy: str = _LIST_REMEDY) -> Any:
    """Read a YAML file as dicts, lists, strings, numbers, booleans and None.

    Keys and dates stay strings. A file whose name ends in ``.json`` is read as JSON.

    Args:
        path: the file.
        remedy: advice for an empty file.

    Raises:
        InputMissingError: the file is missing or empty.
        RecordError: the file is not valid YAML, or has a duplicate key, a tag or a cycle; with line and column.
        InputError: the file cannot be read, or is larger than 32 MiB.
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
    """Parse YAML (or JSON, by ``name``) as :func:`read_yaml`; errors show ``name``."""
    if len(data) > _MAX_BYTES:
        raise InputError(
            f"{name} has more than {_MAX_BYTES >> 20} MiB, too much for a list of data sets; name a folder or a glob "
            "instead of its files."
        )
    text = _decode_text(data, name)
    if name.lower().endswith(".json") and data.strip():
        return _parse_json(text, name)
    try:
        loader = _PlainLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise InputMissingError(f"{name} is empty; {remedy}.")
        _NodeChecker(name).measure(root)
        return loader.construct_document(root)
    except yaml.reader.ReaderError as error:
        reason = f"holds a control character (code {error.character}); write YAML as text"
        raise RecordError(name, None, None, reason) from None
    except yaml.MarkedYAMLError as error:
        context = f"{error.context}: " if error.context else ""
        mark = error.problem_mark or error.context_mark
        raise _make_error(name, mark, f"not valid YAML: {context}{error.problem}") from None
    except RecursionError:
        raise RecordError(name, None, None, _TOO_DEEP) from None


def _parse_json(text: str, name: str) -> Any:
    """Parse JSON that is not valid YAML, such as tabs or surrogate pairs."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            duplicate_key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise RecordError(
                name,
                None,
                None,
                f"the key {quote_value(duplicate_key)} is given twice; remove one of them",
            )
        return mapping

    try:
        value = json.loads(text, object_pairs_hook=once)
        # A lone surrogate is not valid Unicode.
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
            f"is not text: invalid UTF-8 at byte {error.start}; write YAML as text",
        ) from None


def _make_error(name: str, mark: Any, reason: str) -> RecordError:
    line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
    return RecordError(name, line, column, reason)


@final
class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """PyYAML's SafeLoader, except that keys and dates stay text.

    libyaml's parser is faster, and crashes on deep nesting.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own form
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith("timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def fetch_flow_collection_start(self, token_class: type[yaml.Token]) -> None:
        # The time of PyYAML's scanner grows with the square of the depth.
        if self.flow_level == _MAX_DEPTH:
            raise yaml.scanner.ScannerError(None, None, _TOO_DEEP, self.get_mark())
        super().fetch_flow_collection_start(token_class)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:  # noqa: FBT001, FBT002
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep=deep) for key, value in node.value}

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: FBT001, FBT002
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, KeyError):
            reason = f"{quote_value(node.value)} cannot be read as {node.tag.removeprefix(_TAG)}; quote it"
            raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark) from None


_PlainLoader.add_implicit_resolver(FLOAT_TAG, EXPONENT_PATTERN, list("-+0123456789"))


@final
class _NodeChecker:
    """Refuses duplicate keys, tags, cycles and exploding aliases."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._measured: dict[int, tuple[int, int] | None] = {}

    def measure(self, node: yaml.Node) -> tuple[int, int]:
        """Return the number of values in a node and their depth, with aliases followed."""
        if node.tag not in _PLAIN_TAGS:
            raise self._error(node, f"the tag {quote_value(node.tag)} is not supported; write plain YAML")
        if isinstance(node, yaml.ScalarNode):
            return 1, 0
        if id(node) in self._measured:
            measured = self._measured[id(node)]
            if measured is None:
                raise self._error(node, "an alias refers to a list or mapping that contains it")
            return measured
        self._measured[id(node)] = None
        children = node.value
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)
            children = [value for _, value in node.value]
        sizes = [self.measure(child) for child in children]
        size = 1 + sum(size for size, _ in sizes)
        depth = 1 + max((depth for _, depth in sizes), default=0)
        if size > _MAX_VALUES:
            raise self._error(node, f"more than {_MAX_VALUES:,} values, aliases followed; write fewer")
        if depth > _MAX_DEPTH:
            raise self._error(node, _TOO_DEEP)
        self._measured[id(node)] = size, depth
        return size, depth

    def _check_keys(self, node: yaml.MappingNode) -> None:
        keys = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(key, "a key is a list or mapping; write a word")
            if key.value in keys and key.tag != f"{_TAG}merge":
                raise self._error(key, f"the key {quote_value(key.value)} is given twice; remove one of them")
            keys.add(key.value)

    def _error(self, node: yaml.Node, reason: str) -> RecordError:
        return _make_error(self._name, node.start_mark, reason)
