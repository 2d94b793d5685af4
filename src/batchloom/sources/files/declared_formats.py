"""Declared formats of inputs, checked against file names and contents."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, get_args

from batchloom.core.errors import AccessError, DownloadError, InputError, InputMissingError
from batchloom.sources.files.file_kinds import FileDetection, FileKind

InputFormat = Literal["json", "jsonl", "csv", "parquet", "arrow", "hf_dataset"]
INPUT_FORMATS: tuple[InputFormat, ...] = get_args(InputFormat)

# A file declared as JSON may hold JSON Lines, which are read line by line.
_KINDS_BY_FORMAT: dict[InputFormat, tuple[FileKind, ...]] = {
    "json": ("json", "jsonl"),
    "jsonl": ("jsonl",),
    "csv": ("csv", "tsv"),
    "parquet": ("parquet",),
    "arrow": ("arrow",),
}
_KIND_LABELS: dict[FileKind, str] = {
    "text": "plain text",
    "code": "code",
    "json": "a list of JSON objects",
    "jsonl": "JSON Lines",
    "csv": "CSV",
    "tsv": "TSV",
    "parquet": "Parquet",
    "arrow": "Arrow",
    "webdataset": "samples of a WebDataset",
}
_RELOCATED_ERRORS = (InputError, InputMissingError, AccessError, DownloadError)


@dataclass(frozen=True, slots=True)
class DeclaredInput:
    """Declaration of one input.

    Attributes:
        form: format of its files; None to detect it by name and content.
        location: origin of the declaration, for messages; empty if the input itself declares it.
        follow_links: whether to follow symbolic links that lead out of its folder.
    """

    form: InputFormat | None = None
    location: str = ""
    follow_links: bool = False


def matches_format(form: InputFormat | None, kind: FileKind | None) -> bool:
    """Return whether files of this kind match the declared format."""
    return form is None or form == "hf_dataset" or kind in _KINDS_BY_FORMAT[form]


def needs_content_check(form: InputFormat | None, verdict: FileDetection) -> bool:
    """Return whether content must decide: a text name, but a declared format."""
    return form in _KINDS_BY_FORMAT and verdict.kind in ("text", "code")


def make_declared_detection(form: InputFormat | None) -> FileDetection | None:
    """Return a name detection for the declared format; None if only content decides."""
    return FileDetection("json") if form in ("json", "jsonl") else None


def apply_declared_format(
    form: InputFormat | None, name_detection: FileDetection, content_detection: FileDetection
) -> FileDetection:
    """Return the detection by content if it matches the format, else the one by name."""
    if form == "csv" and content_detection.kind == "text":
        # Any text may be CSV, unless it holds records of another kind.
        return FileDetection("csv", name_detection.compression)
    if matches_format(form, content_detection.kind) and (content_detection.sure or content_detection.kind == form):
        return content_detection
    return name_detection


def describe_format_mismatch(form: InputFormat, kind: FileKind) -> str:
    """Describe a file whose kind contradicts the declared format."""
    return (
        f"holds {_KIND_LABELS[kind]} ({kind}), and data_type says {form}; write data_type: {kind}, or leave "
        f"data_type out"
        if kind in _KINDS_BY_FORMAT
        else f"holds {_KIND_LABELS[kind]}, and data_type says {form}; leave data_type out, or name another file"
    )


def get_declared_input(declared_inputs: Sequence[DeclaredInput], number: int) -> DeclaredInput:
    """Return the declaration of an input, or an empty one."""
    return declared_inputs[number] if declared_inputs else DeclaredInput()


def reraise_with_location(error: InputError, location: str) -> NoReturn:
    """Raise the error of an input again, prefixed with the declaration's location."""
    if location and type(error) in _RELOCATED_ERRORS:
        raise type(error)(f"{location}: {error}") from error
    raise error
