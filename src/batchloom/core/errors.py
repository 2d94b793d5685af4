"""Exit codes and exception classes.

Each message states the fact, the value and the remedy. Every class also derives from the matching built-in, so that
``except FileNotFoundError`` and ``except ValueError`` keep working.
"""

import json
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Self

# Prefix of the reason if a record is not JSON.
INVALID_JSON_PREFIX = "not valid JSON: "
_MAX_SHOWN_PROBLEMS = 20


class ExitCode(IntEnum):
    """Exit code of a command.

    Attributes:
        meaning: what a script can conclude from the code.
    """

    meaning: str

    DONE = 0, "The command is done, and a check found no fault."
    FAILED = (
        1,
        ("The command failed, a check or comparison found a fault, or the reader of the output stopped reading."),
    )
    USAGE = 2, "An option, an argument or a settings file is wrong."
    HUNG_UP = 129, "The terminal was closed (SIGHUP)."
    INTERRUPTED = 130, "Ctrl-C stopped the command (SIGINT)."
    TERMINATED = 143, "The process was terminated (SIGTERM), or another worker of its run left."

    def __new__(cls, code: int, meaning: str = "") -> Self:
        """Return the code with its meaning."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member


class BatchloomError(Exception):
    """Base of every error batchloom raises on purpose."""


class InputError(BatchloomError, ValueError):
    """An input or an option cannot be used as given."""


class InputMissingError(InputError, FileNotFoundError):
    """An input does not exist, or holds nothing usable."""


class AccessError(InputError, PermissionError):
    """An input exists, or may exist, but these credentials give no access to it."""


class DownloadError(InputError, ConnectionError):
    """A remote input cannot be reached, or its download failed."""


class NoRangesError(DownloadError):
    """A file exists, but its server does not support range requests."""


class RecordError(InputError):
    """One record of an input cannot be used.

    Attributes:
        file: the input as the user named it.
        line: 1-based line of the fault, None if lines have no meaning.
        column: 1-based column of the fault, None for the full record.
        reason: the fault and its remedy.
        row: 1-based row of the record, for formats with rows; else None.
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
        self.file = file
        self.line = line
        self.column = column
        self.reason = reason
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
    """One record of an input is not JSON; also a ``json.JSONDecodeError``."""

    def __init__(
        self,
        file: str,
        line: int | None,
        column: int | None,
        reason: str,
        row: int | None = None,
    ) -> None:
        super().__init__(file, line, column, reason, row)
        self.msg = reason.removeprefix(INVALID_JSON_PREFIX)
        self.doc = ""
        self.pos = 0
        self.lineno = line or 1
        self.colno = column or 1

    @staticmethod
    def _sentence(file: str, line: int | None, column: int | None, reason: str, row: int | None) -> str:
        location = f"on line {line}" if line is not None else f"in row {row}"
        column_text = f", column {column}" if column is not None else ""
        return f"Invalid JSON {location} in {file}{column_text}: {reason.removeprefix(INVALID_JSON_PREFIX)}"


def make_record_error(
    file: str, line: int | None, column: int | None, reason: str, row: int | None = None
) -> RecordError:
    """Return the error of a bad record, with a class that fits the reason."""
    kind = InvalidJsonError if reason.startswith(INVALID_JSON_PREFIX) else RecordError
    return kind(file, line, column, reason, row)


class UnusableRecordError(InputError):
    """A single record cannot be used; callers add its location with a RecordError.

    Attributes:
        reason: the field, the fault, the value and the remedy.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class DamagedFileError(InputError):
    """A file is cut short or broken, or has no valid index."""


class SchemaError(InputError):
    """No schema fits the records of a source, or its named columns are missing.

    Attributes:
        columns: the columns of the first records.
        suggestion: a ``--map`` value that would work, None without a guess.
    """

    def __init__(self, reason: str, columns: Sequence[str] = (), suggestion: str | None = None) -> None:
        super().__init__(reason)
        self.columns = tuple(columns)
        self.suggestion = suggestion


class TooManyBadRecordsError(InputError):
    """More records were quarantined than the budget (``max_bad``) allows."""


class SettingsError(BatchloomError, ValueError):
    """Settings that are unknown or contradict each other; the first problems at once.

    Attributes:
        problems: one sentence per problem, starting with the path of the setting; the message has the first 20.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        # One for each item of a list would fill the terminal.
        rest = len(problems) - _MAX_SHOWN_PROBLEMS
        shown = [*problems[:_MAX_SHOWN_PROBLEMS], *([f"and {rest:,} more"] if rest > 0 else [])]
        super().__init__("; ".join(shown))
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
    """A medium of a stored document cannot be read, or has changed since preparation."""


class StoreMissingError(StoreError, FileNotFoundError):
    """A store does not exist at the expected path."""


class GenerationError(StoreError):
    """A store does not have the generation, or no longer has it."""


class StoreConflictError(StoreError, FileExistsError):
    """The output folder holds something other than this job's output."""


class OutputError(BatchloomError, OSError):
    """The output cannot be written: disk full, permission denied, not a folder."""


class WorkerError(BatchloomError, RuntimeError):
    """Workers cannot be started, reached or kept alive, or an error cannot be sent."""


class PlanError(BatchloomError, ValueError):
    """A plan cannot be made or used this way: sizes, positions or ranks do not fit."""


class StateError(BatchloomError, ValueError):
    """A state of another plan, store or tokenizer; names the fields that differ."""


class TrainError(BatchloomError, RuntimeError):
    """Training cannot start or continue."""
