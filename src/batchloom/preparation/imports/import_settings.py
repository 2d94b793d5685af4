"""Settings of ``import``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

from batchloom.core.settings import raise_problems, suggest, to_plain
from batchloom.preparation.imports.token_files import FLAT_DTYPES
from batchloom.sources import make_input_labels

LinkMode = Literal["link", "symlink", "copy"]
_LINK_MODES = ("link", "symlink", "copy")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSpec:
    """Settings for turning token id files into a store.

    Attributes:
        inputs: Megatron prefixes, flat files of ids, ``.npy`` files, and folders of prefixes.
        val: inputs of the subset ``val``.
        tokenizer: tokenizer of the ids, in the syntax of ``prepare`` (without ``train:N``), or None.
        end_token: end-of-document token, if the tokenizer does not name one.
        vocab_size: vocabulary size without a tokenizer; every id is below it.
        dtype: dtype of the ids in flat files.
        eod: id that ends each document of a flat file; without a tokenizer also recorded as the end
            token.
        document_tokens: number of tokens per document of a flat file, if no id ends documents.
        val_fraction: share of documents, chosen by hash, for the subset ``val``; only with ``copy``.
        tokens_per_shard: maximum number of tokens per copied shard; a single longer document may exceed it.
        how: ``link`` (hard links), ``symlink`` (the store then depends on the original files) or
            ``copy``.
    """

    inputs: tuple[str, ...]
    val: tuple[str, ...] = ()
    tokenizer: str | None = None
    end_token: str | None = None
    vocab_size: int | None = None
    dtype: str | None = None
    eod: int | None = None
    document_tokens: int | None = None
    val_fraction: float = 0.0
    tokens_per_shard: int = 100_000_000
    how: LinkMode = "link"

    def __post_init__(self) -> None:
        raise_problems(_check_import_spec(self) + _check_combinations(self))
        object.__setattr__(self, "val_fraction", float(self.val_fraction))


def import_spec_to_plain(spec: ImportSpec) -> dict[str, Any]:
    """Return the settings as stored in the manifest: plain values, no absolute paths."""
    labels = make_input_labels([*spec.inputs, *spec.val])
    plain = to_plain(spec)
    plain["inputs"], plain["val"] = labels[: len(spec.inputs)], labels[len(spec.inputs) :]
    if spec.tokenizer and PurePath(spec.tokenizer).is_absolute():
        plain["tokenizer"] = Path(spec.tokenizer).name
    return plain


def _check_import_spec(spec: ImportSpec) -> list[str]:
    problems = []
    if not spec.inputs:
        problems.append("inputs: no inputs; name at least one prefix or file")
    if any(not isinstance(path, str) or not path for path in (*spec.inputs, *spec.val)):
        problems.append(f"inputs: {(*spec.inputs, *spec.val)!r} contains a value that is not a path")
    problems += _check_choice("how", spec.how, _LINK_MODES)
    if spec.dtype is not None:
        problems += _check_choice("dtype", spec.dtype, FLAT_DTYPES)
    least = {"vocab_size": 1, "eod": 0, "document_tokens": 1, "tokens_per_shard": 1}
    for name, bound in least.items():
        value = getattr(spec, name)
        if value is None and name != "tokens_per_shard":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not bound <= value < 2**31:
            problems.append(f"{name}: {value!r} is not a whole number from {bound} to {2**31 - 1:,}")
    value = spec.val_fraction
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        problems.append(f"val_fraction: {value!r} is not in [0, 1)")
    return problems


def _check_choice(name: str, value: object, choices: Sequence[str]) -> list[str]:
    if value in choices:
        return []
    return [f"{name}: {value!r} is none of {', '.join(choices)}{suggest(str(value), choices)}"]


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
