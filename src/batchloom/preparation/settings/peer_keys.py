"""Keys of other libraries' files.

One table per library and kind of file gives the treatment of each key.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from batchloom.core.settings import is_positive_number, quote_value, suggest
from batchloom.core.wording import shorten

# Templates of LLaMA-Factory and ms-swift that are built-in ones here; tests/peers compares their texts.
_EQUAL_TEMPLATES = ("chatml", "llama3")
_MAX_QUOTED_LENGTH = 120

# Values that do the same as a missing key.
_NEUTRAL_VALUES: tuple[Any, ...] = (None, False, "", [], {}, 0, 0.0)


class PeerKey(NamedTuple):
    """Treatment of one key.

    Attributes:
        treatment: ``read``: translated by the code of the library; ``unused``: without effect on a store, which a
            note says; ``refused``: it would change what is trained.
        reason: for unused keys, what takes its place; for refused ones, the remedy.
        neutral: values that do the same as a missing key, in addition to null, false and empty ones.
    """

    treatment: Literal["read", "unused", "refused"]
    reason: str = ""
    neutral: tuple[Any, ...] = ()


def declare_keys(
    read: str,
    unused: Mapping[str, str] = MappingProxyType({}),
    refused: Mapping[str, str] = MappingProxyType({}),
    neutral: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
) -> dict[str, PeerKey]:
    """Return the treatment of each key of a file.

    ``unused`` and ``refused`` hold the keys of each reason. Several keys are separated by spaces.
    """
    keys = {key: PeerKey("read") for key in read.split()}
    keys |= {key: PeerKey("unused", reason) for reason, names in unused.items() for key in names.split()}
    keys |= {key: PeerKey("refused", reason) for reason, names in refused.items() for key in names.split()}
    return keys | {key: keys[key]._replace(neutral=values) for key, values in neutral.items()}


@dataclass(slots=True)
class PeerDatasets:
    """Data sets of another library's file in the settings of a manifest.

    Attributes:
        datasets: entries of a manifest.
        settings: settings of the recipe that the file states, each with its key in the file.
        not_taken: keys without effect on the store, each with the reason.
        column_keys: keys of the file that name columns, for messages.
        notes: notes for the user.
        problems: all problems of the file, each with its path.
    """

    datasets: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    not_taken: list[str] = field(default_factory=list)
    column_keys: str = "columns:"
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def check_job(self, job: Mapping[str, Any], table: Mapping[str, PeerKey]) -> "PeerKeyReader":
        """Check the data settings of a job, and return their reader."""
        # Other keys are the trainer's, unless one is almost that of a data setting.
        self.problems += [
            f"{key}: unknown setting; did you mean {close[0]!r}?"
            for key in job
            if key not in table and (close := difflib.get_close_matches(str(key), table, n=1, cutoff=0.9))
        ]
        data_settings = {key: value for key, value in job.items() if key in table}
        self.not_taken += PeerKeyReader(data_settings, "", self.problems).check(table)
        return PeerKeyReader(job, "", self.problems)

    def take(self, setting: str, value: Any, key: str) -> None:
        """Set a setting of the recipe from a key of the file."""
        self.settings[setting] = value, key

    def take_text(self, setting: str, reader: "PeerKeyReader", key: str) -> None:
        """Set a setting from a key that holds a text, if there is one."""
        if (text := reader.text(key)) is not None:
            self.take(setting, text, key)


@dataclass(slots=True)
class PeerKeyReader:
    """Typed access to the values of one mapping of another library's file.

    Attributes:
        values: the mapping.
        path: its path in the file, with a final dot; empty at the top.
        problems: list that receives the problems.
    """

    values: Mapping[str, Any]
    path: str
    problems: list[str]

    def check(self, table: Mapping[str, PeerKey]) -> list[str]:
        """Report unknown and refused keys; return the unused ones by their reason."""
        unused: dict[str, list[str]] = {}
        for key, value in self.values.items():
            entry = table.get(key)
            if entry is None:
                self.problems.append(f"{self.path}{key}: unknown setting{suggest(str(key), table)}")
            elif not is_neutral(value) and value not in entry.neutral:
                if entry.treatment == "refused":
                    self.problems.append(f"{self.path}{key}: {quote_yaml(value)} is not supported; {entry.reason}")
                elif entry.treatment == "unused":
                    unused.setdefault(entry.reason, []).append(key)
        return [f"{', '.join(keys)} ({reason})" for reason, keys in unused.items()]

    def text(self, key: str, default: str | None = None) -> str | None:
        """Return a text; report any other value."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, str) and value:
            return value
        return self._report(key, "a text", default)

    def number(self, key: str) -> int | None:
        """Return a whole number above 0; report any other value."""
        value = self.values.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            return value
        self._report(key, "a whole number above 0", None)
        return None

    def flag(self, key: str) -> bool:
        """Return true or false; report any other value."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self._report(key, "true or false", None)
        return value is True

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        """Return one of some words; report any other value."""
        value = self.values.get(key)
        if value is None or value in choices:
            return value or default
        hint = suggest(value, choices) if isinstance(value, str) else ""
        self.problems.append(f"{self.path}{key}: {quote_yaml(value)} is none of {', '.join(choices)}{hint}")
        return default

    def texts(self, key: str) -> list[str]:
        """Return a list of texts, or a single one as a list; report any other value."""
        value = self.values.get(key)
        if value is None:
            return []
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list) and all(isinstance(item, str) and item for item in items):
            return items
        self._report(key, "a list of texts", None)
        return []

    def mapping(self, key: str) -> "PeerKeyReader | None":
        """Return the reader of a nested mapping; None if there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, dict):
            return PeerKeyReader(value, f"{self.path}{key}.", self.problems)
        self._report(key, "a mapping", None)
        return None

    def _report(self, key: str, expected: str, default: str | None) -> str | None:
        self.problems.append(f"{self.path}{key}: {quote_yaml(self.values[key])} is not {expected}")
        return default


def read_length_limit(
    reader: PeerKeyReader, length_key: str, policy_key: str, policies: Mapping[str, str], result: PeerDatasets
) -> None:
    """Take the maximum length of a document and its policy.

    The first of ``policies`` is the library's default, and the default of ``overlong``.
    """
    policy = reader.choice(policy_key, tuple(policies), next(iter(policies)))
    length = reader.number(length_key)
    if length is not None:
        result.take("max_tokens", length, length_key)
    if reader.values.get(policy_key) is not None:
        if length is None:
            result.not_taken.append(f"{policy_key} (not used without {length_key}; give --max-tokens and --overlong)")
        else:
            result.take("overlong", policies[policy], policy_key)


def read_validation_share(reader: PeerKeyReader, key: str, result: PeerDatasets, *, counts: bool = True) -> None:
    """Take the share of validation; a missing one is 0, as in these libraries.

    With ``counts`` the library also allows a number of records, which is not taken.
    """
    value: Any = reader.values.get(key)
    if is_neutral(value):
        result.take("val_fraction", 0.0, key if key in reader.values else f"no {key}")
    elif is_positive_number(value) and value < 1:
        result.take("val_fraction", value, key)
    elif is_positive_number(value) and counts:
        result.not_taken.append(f"{key} (a number of records; give a share with --val-fraction)")
    else:
        result.problems.append(f"{key}: {quote_yaml(value)} is not a share below 1{' or a number of records' * counts}")


def read_template(reader: PeerKeyReader, library: str, result: PeerDatasets) -> None:
    """Take a template that is equal here; the others of a library are its own."""
    name = reader.text("template")
    if name in _EQUAL_TEMPLATES:
        result.take("template", name, "template")
    elif name is not None:
        result.not_taken.append(describe_own_template("template", name, library))


def describe_own_template(key: str, name: str, library: str) -> str:
    """Describe a template that only another library has, and its replacement."""
    return (
        f"{key} {name} (it is {library}'s own; the tokenizer's chat template is used, else plain; choose one with "
        "--template: chatml, llama3, alpaca or a file)"
    )


def quote_yaml(value: object) -> str:
    """Return a value for a message, as a file has it."""
    return quote_value(value) if isinstance(value, str) else shorten(json.dumps(value), _MAX_QUOTED_LENGTH)


def is_neutral(value: object) -> bool:
    """Return whether a value does the same as a missing key."""
    return any(value == neutral and isinstance(value, type(neutral)) for neutral in _NEUTRAL_VALUES)


def merge_values(values: list[str]) -> str:
    """Return several values of a role in the form of a column mapping."""
    return "|".join(dict.fromkeys(values))
