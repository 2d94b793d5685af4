"""What somebody says the files of an input are, against what their names and contents say."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, get_args

from batchloom.core.errors import AccessError, DownloadError, InputError, InputMissingError
from batchloom.sources.files.file_kinds import Kind, Verdict

Form = Literal["json", "jsonl", "csv", "parquet", "arrow", "hf_dataset"]
FORMS: tuple[Form, ...] = get_args(Form)

# JSON lines in a file that is said to be JSON are read line by line, as everywhere.
_KINDS: dict[Form, tuple[Kind, ...]] = {
    "json": ("json", "jsonl"),
    "jsonl": ("jsonl",),
    "csv": ("csv", "tsv"),
    "parquet": ("parquet",),
    "arrow": ("arrow",),
}
_CALLED: dict[Kind, str] = {
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
_RETOLD = (InputError, InputMissingError, AccessError, DownloadError)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is said of one input.

    Attributes:
        form: what its files are; None: told by their names and contents.
        place: where it was asked for, for messages; empty where the input itself says it.
        follow_links: whether symbolic links are followed that lead out of its folder.
    """

    form: Form | None = None
    place: str = ""
    follow_links: bool = False


def fits(form: Form | None, kind: Kind | None) -> bool:
    """Whether files of this kind are what was said."""
    return form is None or form == "hf_dataset" or kind in _KINDS[form]


def looked_for(form: Form | None, verdict: Verdict) -> bool:
    """Whether what a file holds is to decide, since its name says text and somebody else."""
    return form in _KINDS and verdict.kind in ("text", "code")


def name_for(form: Form | None) -> Verdict | None:
    """What a name would have said that says what is looked for; None where contents alone tell."""
    return Verdict("json") if form in ("json", "jsonl") else None


def as_said(form: Form | None, named: Verdict, found: Verdict) -> Verdict:
    """The verdict on a file whose name says text: what it holds, where that is what was said."""
    if form == "csv" and found.kind == "text":
        # Any text may be CSV, and what holds records of another kind is none.
        return Verdict("csv", named.compression)
    if fits(form, found.kind) and (found.sure or found.kind == form):
        return found
    return named


def disagreement(form: Form, kind: Kind) -> str:
    """What to say of a file that is something else than was said."""
    return (
        f"holds {_CALLED[kind]} ({kind}), and data_type says {form}; write data_type: {kind}, or leave data_type out"
        if kind in _KINDS
        else f"holds {_CALLED[kind]}, and data_type says {form}; leave data_type out, or name another file"
    )


def asked_of(asked: Sequence[Asked], number: int) -> Asked:
    """What is said of an input, where anything is."""
    return asked[number] if asked else Asked()


def retold(error: InputError, place: str) -> NoReturn:
    """Raise the error of an input again, with the place where it was asked for."""
    if place and type(error) in _RETOLD:
        raise type(error)(f"{place}: {error}") from error
    raise error
