"""The one tree of exceptions: each says the fact, the value and the remedy in one sentence or two.

Every class also derives from the built-in people already catch, so that
``except FileNotFoundError`` and ``except ValueError`` keep working.
"""

import json
from collections.abc import Sequence
from typing import Any

# How the reason begins where a record is no JSON.
INVALID_JSON_PREFIX = "not valid JSON: "


class BatchloomError(Exception):
    """Base of every error batchloom raises on purpose."""


class InputError(BatchloomError, ValueError):
    """An input or an option cannot be used as given."""


class InputMissingError(InputError, FileNotFoundError):
    """An input does not exist, or holds nothing that can be used."""


class AccessError(InputError, PermissionError):
    """An input exists, or may exist, and is not given to whoever asks with these credentials."""


class DownloadError(InputError, ConnectionError):
    """An input lies elsewhere and cannot be reached, or its bytes did not come."""


class NoRangesError(DownloadError):
    """A file is there, and its server gives it as a whole only."""


class RecordError(InputError):
    """One record of an input cannot be used.

    Attributes:
        file: the input as the user named it.
        line: 1-based line of the fault, None where lines have no meaning.
        column: 1-based column of the fault, None where it is the record as a whole.
        reason: what is wrong and how to mend it.
        row: 1-based row of the record, where people count rows; else None.
    """

    def __init__(
        self,
        file: str,
        line: int | None,
        column: int | None,
        reason: str,
        row: int | None = None,
    ) -> None:
        Exception.__init__(self, self._sentence(file, line, column, reason, row))
        self.file, self.line, self.column, self.reason = file, line, column, reason
        self.row = row

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.file, self.line, self.column, self.reason, self.row)

    @staticmethod
    def _sentence(file: str, line: int | None, column: int | None, reason: str, row: int | None) -> str:
        location = f"{file}, line {line}" if line is not None else file
        if line is None and row is not None:
            location += f", row {row}"
        if column is not None:
            location += f", column {column}"
        return f"{location}: {reason}"


class InvalidJsonError(RecordError, json.JSONDecodeError):
    """One record of an input is no JSON; also a ``json.JSONDecodeError``."""

    def __init__(
        self,
        file: str,
        line: int | None,
        column: int | None,
        reason: str,
        row: int | None = None,
    ) -> None:
        super().__init__(file, line, column, reason, row)
        self.msg, self.doc, self.pos = reason.removeprefix(INVALID_JSON_PREFIX), "", 0
        self.lineno, self.colno = line or 1, column or 1

    @staticmethod
    def _sentence(file: str, line: int | None, column: int | None, reason: str, row: int | None) -> str:
        location = f"on line {line}" if line is not None else f"in row {row}"
        column_text = f", column {column}" if column is not None else ""
        return f"Invalid JSON {location} in {file}{column_text}: {reason.removeprefix(INVALID_JSON_PREFIX)}"


def make_record_error(
    file: str, line: int | None, column: int | None, reason: str, row: int | None = None
) -> RecordError:
    """The error of a bad record, of the class that its reason asks for."""
    kind = InvalidJsonError if reason.startswith(INVALID_JSON_PREFIX) else RecordError
    return kind(file, line, column, reason, row)


class UnusableRecordError(InputError):
    """A record, looked at by itself, cannot be used; who knows its place makes a RecordError of it.

    Attributes:
        reason: where in the record, what is wrong, what was there and how to mend it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SchemaError(InputError):
    """No schema fits the records of a source, or the columns named for it are not there.

    Attributes:
        columns: the columns the first records have.
        suggestion: what ``--map`` would make it work, None where there is no guess.
    """

    def __init__(self, reason: str, columns: Sequence[str] = (), suggestion: str | None = None) -> None:
        super().__init__(reason)
        self.columns, self.suggestion = tuple(columns), suggestion


class TooManyBadRecordsError(InputError):
    """More records were quarantined than the budget (``max_bad``) allows."""


class SettingsError(BatchloomError, ValueError):
    """Settings that are unknown or contradict each other; all problems at once.

    Attributes:
        problems: one sentence each, starting with the path of the setting.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


class MissingDependencyError(BatchloomError, ImportError):
    """An optional package is needed and not installed."""


class TokenizerError(BatchloomError, ValueError):
    """A tokenizer cannot be found, read or trusted."""


class TemplateError(InputError):
    """A chat template cannot be found, compiled, bounded or understood."""


class StoreError(BatchloomError, ValueError):
    """A store (or a bare Megatron prefix) is damaged, hostile or of another format."""


class MediumError(InputError):
    """A medium of a stored document cannot be read, or is not what it was when the store was made."""


class StoreMissingError(StoreError, FileNotFoundError):
    """There is no store where one was expected."""


class GenerationError(StoreError):
    """A store has no such generation, or has it no longer."""


class StoreConflictError(StoreError, FileExistsError):
    """The output folder holds something else than this job would write."""


class OutputError(BatchloomError, OSError):
    """The output cannot be written: no room, no permission, not a folder."""


class WorkerError(BatchloomError, RuntimeError):
    """Workers cannot be started, reached or kept, or what one raised cannot be sent on."""


class PlanError(BatchloomError, ValueError):
    """A plan cannot be made or asked so: sizes, positions, ranks that do not fit."""


class StateError(BatchloomError, ValueError):
    """A state belongs to another plan, store or tokenizer; names the fields that differ."""


class TrainError(BatchloomError, RuntimeError):
    """Training cannot start or go on."""
