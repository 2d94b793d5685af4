"""The one tree of exceptions: each says the fact, the value and the remedy in one sentence or two.

Every class also derives from the built-in people already catch, so that
``except FileNotFoundError`` and ``except ValueError`` keep working.
"""

from collections.abc import Sequence


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


class RecordError(InputError):
    """One record of an input cannot be used.

    Attributes:
        file: the input as the user named it.
        line: 1-based line of the record, None where lines have no meaning.
        column: 1-based column of the fault, None where it is the record as a whole.
        reason: what is wrong and how to mend it.
    """

    def __init__(self, file: str, line: int | None, column: int | None, reason: str) -> None:
        place = f"{file}, line {line}" if line is not None else file
        if column is not None:
            place += f", column {column}"
        super().__init__(f"{place}: {reason}")
        self.file, self.line, self.column, self.reason = file, line, column, reason


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


class MissingDependencyError(BatchloomError, ImportError):
    """An optional package is needed and not installed."""


class TokenizerError(BatchloomError, ValueError):
    """A tokenizer cannot be found, read or trusted."""


class StoreError(BatchloomError, ValueError):
    """A store (or a bare Megatron prefix) is damaged, hostile or of another format."""


class StoreMissingError(StoreError, FileNotFoundError):
    """There is no store where one was expected."""


class StoreConflictError(StoreError, FileExistsError):
    """The output folder holds something else than this job would write."""


class OutputError(BatchloomError, OSError):
    """The output cannot be written: no room, no permission, not a folder."""


class PlanError(BatchloomError, ValueError):
    """A plan cannot be made or asked so: sizes, positions, ranks that do not fit."""


class StateError(BatchloomError, ValueError):
    """A state belongs to another plan, store or tokenizer; names the fields that differ."""


class TrainError(BatchloomError, RuntimeError):
    """Training cannot start or go on."""
