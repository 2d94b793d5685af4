"""Settings of ``import``."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from batchloom.core.addresses import make_input_labels
from batchloom.core.settings import Setting, find_choice_problem, find_problems, raise_problems, to_plain
from batchloom.preparation.imports.token_files import FLAT_DTYPES
from batchloom.preparation.settings.recipe import parse_token_count

LinkMode = Literal["link", "symlink", "copy"]
_MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSpec:
    """Settings for turning token id files into a store."""

    inputs: tuple[str, ...]
    val: tuple[str, ...] = ()
    tokenizer: Annotated[
        str | None, Setting(help="Tokenizer that made the ids, in the form prepare takes; not train:N.")
    ] = None
    end_token: Annotated[
        str | None,
        Setting(
            help="End-of-document token; config for the eos_token of tokenizer_config.json.",
            shown_default="the tokenizer's",
        ),
    ] = None
    vocab_size: Annotated[
        int | None,
        Setting(help="Exclusive upper bound of the ids, if no tokenizer is given.", minimum=1, maximum=_MAX_COUNT),
    ] = None
    dtype: Annotated[
        str | None,
        Setting(
            help="Type of the ids of a flat file: uint16, uint32, int32, ... A .npy file has its own.",
            check=lambda value: find_choice_problem(value, FLAT_DTYPES),
        ),
    ] = None
    eod: Annotated[
        int | None,
        Setting(
            help="Id that ends each document of a flat file; without a tokenizer also recorded as the end token.",
            maximum=_MAX_COUNT,
            shown_default="the tokenizer's end token",
        ),
    ] = None
    document_tokens: Annotated[
        int | None,
        Setting(
            help="Number of tokens after which a flat file is cut into documents, instead of --eod.",
            minimum=1,
            maximum=_MAX_COUNT,
        ),
    ] = None
    val_fraction: Annotated[
        float, Setting(help="With --copy, share of the documents for the subset val, chosen by hash.", below=1)
    ] = 0.0
    tokens_per_shard: Annotated[
        int,
        Setting(
            help="With --copy, maximum tokens of a shard (100M, 1G); a single longer document gets a shard of its own.",
            minimum=1,
            maximum=_MAX_COUNT,
            option_type=str,
            metavar="SIZE",
            shown_default="100M",
        ),
    ] = 100_000_000
    how: Annotated[
        LinkMode,
        Setting(
            help="link (hard links), symlink (the store then depends on the files) or copy (new shards).",
            has_option=False,
        ),
    ] = "link"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens_per_shard", parse_token_count(self.tokens_per_shard))
        problems = [] if self.inputs else ["inputs: no inputs; name at least one prefix or file"]
        if any(not isinstance(path, str) or not path for path in (*self.inputs, *self.val)):
            problems.append(f"inputs: {(*self.inputs, *self.val)!r} contains a value that is not a path")
        raise_problems(problems + find_problems(self) + _check_combinations(self))
        object.__setattr__(self, "val_fraction", float(self.val_fraction))


def import_spec_to_plain(spec: ImportSpec) -> dict[str, Any]:
    """Return the settings as stored in the manifest: plain values, no absolute paths."""
    labels = make_input_labels([*spec.inputs, *spec.val])
    plain = to_plain(spec)
    plain["inputs"], plain["val"] = labels[: len(spec.inputs)], labels[len(spec.inputs) :]
    if spec.tokenizer and PurePath(spec.tokenizer).is_absolute():
        plain["tokenizer"] = Path(spec.tokenizer).name
    return plain


def _check_combinations(spec: ImportSpec) -> list[str]:
    problems = []
    if (spec.tokenizer is None) == (spec.vocab_size is None):
        problems.append(
            "tokenizer: give the meaning of the ids: either --tokenizer, or --vocab-size if the tokenizer is "
            "unknown (batchloom check PREFIX prints the highest id)"
        )
    if spec.tokenizer is None and spec.end_token is not None:
        problems.append("end_token: names a token of a tokenizer; without --tokenizer give --eod ID")
    if spec.eod is not None and spec.vocab_size is not None and spec.eod >= spec.vocab_size:
        problems.append(f"eod: {spec.eod} is outside a vocabulary of {spec.vocab_size} ids")
    if spec.eod is not None and spec.document_tokens is not None:
        problems.append("document_tokens: a document ends at --eod or after a number of tokens, not both")
    if spec.val_fraction and spec.val:
        problems.append("val_fraction: --val already names the files of val; leave one of them out")
    if spec.val_fraction and spec.how != "copy":
        problems.append(
            "val_fraction: a linked file belongs to one subset as a whole; give --copy, or name separate files "
            f"with --val (how is {spec.how!r})"
        )
    return problems


ImportInputs = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
