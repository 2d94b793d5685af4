"""What somebody says the files of an input are, against what their names and contents say."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, get_args

from batchloom.core.errors import AccessError, DownloadError, InputError, InputMissingError
from batchloom.sources.files.file_kinds import FileDetection, FileKind

InputFormat = Literal["json", "jsonl", "csv", "parquet", "arrow", "hf_dataset"]
INPUT_FORMATS: tuple[InputFormat, ...] = get_args(InputFormat)

# JSON lines in a file that is said to be JSON are read line by line, as everywhere.
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
    """What is said of one input.

    Attributes:
        form: what its files are; None: told by their names and contents.
        location: where it was asked for, for messages; empty where the input itself says it.
        follow_links: whether symbolic links are followed that lead out of its folder.
    """

    form: InputFormat | None = None
    location: str = ""
    follow_links: bool = False


def matches_format(form: InputFormat | None, kind: FileKind | None) -> bool:
    """Whether files of this kind are what was said."""
    return form is None or form == "hf_dataset" or kind in _KINDS_BY_FORMAT[form]


def needs_content_check(form: InputFormat | None, verdict: FileDetection) -> bool:
    """Whether what a file holds is to decide, since its name says text and somebody else."""
    return form in _KINDS_BY_FORMAT and verdict.kind in ("text", "code")


def make_declared_detection(form: InputFormat | None) -> FileDetection | None:
    """What a name would have said that says what is looked for; None where contents alone tell."""
    return FileDetection("json") if form in ("json", "jsonl") else None


def apply_declared_format(
    form: InputFormat | None, name_detection: FileDetection, content_detection: FileDetection
) -> FileDetection:
    """The verdict on a file whose name says text: what it holds, where that is what was said."""
    if form == "csv" and content_detection.kind == "text":
        # Any text may be CSV, and what holds records of another kind is none.
        return FileDetection("csv", name_detection.compression)
    if matches_format(form, content_detection.kind) and (content_detection.sure or content_detection.kind == form):
        return content_detection
    return name_detection


def describe_format_mismatch(form: InputFormat, kind: FileKind) -> str:
    """What to say of a file that is something else than was said."""
    return (
        f"holds {_KIND_LABELS[kind]} ({kind}), and data_type says {form}; write data_type: {kind}, or leave "
        f"data_type out"
        if kind in _KINDS_BY_FORMAT
        else f"holds {_KIND_LABELS[kind]}, and data_type says {form}; leave data_type out, or name another file"
    )


def get_declared_input(declared_inputs: Sequence[DeclaredInput], number: int) -> DeclaredInput:
    """What is said of an input, where anything is."""
    return declared_inputs[number] if declared_inputs else DeclaredInput()


def reraise_with_location(error: InputError, location: str) -> NoReturn:
    """Raise the error of an input again, with the place where it was asked for."""
    if location and type(error) in _RELOCATED_ERRORS:
        raise type(error)(f"{location}: {error}") from error
    raise error
