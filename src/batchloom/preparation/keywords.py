"""Keyword arguments of functions; docs/write_reference.py writes them."""

from collections.abc import Mapping, Sequence
from datetime import date
from os import PathLike
from typing import Any, Literal, TypedDict

from batchloom.preparation.settings.media_recipe import MediaRecipe
from batchloom.preparation.settings.read_recipe import FimRecipe
from batchloom.preparation.settings.recipe import DedupRecipe, PretrainedTokenizer
from batchloom.text import CleanStep


class DocumentOptions(TypedDict, total=False):
    """Settings of documents; None is unset."""

    tokenizer: str | PretrainedTokenizer | None
    end_token: str | None
    follow_links: bool | None
    max_bad: int | str | None
    text_field: str | None
    mapping: Mapping[str, str] | str | None
    ignore: str | Sequence[str] | None
    input_split: str | None
    val_from: str | None
    encoding: str | None
    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    allow_skipped: bool | None
    prompts: bool | None
    carry: str | Sequence[str] | None
    split_on: str | None
    normalize: bool | None
    clean: Sequence[CleanStep | str | Mapping[str, Any]] | None
    media: MediaRecipe | Mapping[str, Any] | None
    template: str | None
    template_args: Mapping[str, Any] | Sequence[str] | None
    template_date: str | date | None
    tool_format: str | None
    tool_arguments: Literal["as-is", "parse", "text"] | None
    reasoning: Literal["keep", "mask", "drop", "split"] | None
    default_system: str | None
    train_on: str | None
    train_on_eos: Literal["turn", "all", "last", "none"] | None
    max_tokens: int | None


class StreamedOptions(DocumentOptions, total=False):
    """Settings of a stream; None is unset."""

    dtype: Literal["auto", "uint16", "int32"] | None
    val_fraction: float | None
    test_fraction: float | None


class PrepareOptions(StreamedOptions, total=False):
    """Settings of a store and of the run that makes it; None is unset."""

    tokens_per_shard: int | str | None
    balance_subsets: bool | None
    dedup: DedupRecipe | str | Mapping[str, Any] | None
    fim: FimRecipe | float | Mapping[str, Any] | None
    overlong: Literal["drop", "truncate", "truncate-left", "truncate-turns", "split", "error"] | None
    prove: bool | None
    append: bool | None
    restart: bool | None
    hash_inputs: bool | None
    dry_run: bool | None
    streaming: bool | None
    work: str | PathLike[str] | None
    for_loader: bool | None
    workers: int | Literal["auto"] | None
    engine: Literal["pool", "ray"] | None
    address: str | None
    memory_per_worker: int | str | None


class ImportOptions(TypedDict, total=False):
    """Settings of an import of ids."""

    tokenizer: str | None
    end_token: str | None
    vocab_size: int | None
    dtype: str | None
    eod: int | None
    document_tokens: int | None
    val_fraction: float
    tokens_per_shard: int
    how: Literal["link", "symlink", "copy"]
