"""Keyword arguments of ``prepare``, ``stream`` and ``doctor``.

Each is a field of :class:`Recipe`, :class:`ReadRecipe` or :class:`ChatRecipe`, which document and check it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from batchloom.chat.templates import TrainOn
from batchloom.core.settings import suggest
from batchloom.preparation.settings.dedup_recipe import DedupRecipe
from batchloom.preparation.settings.fim_recipe import FimRecipe
from batchloom.preparation.settings.media_recipe import MediaRecipe
from batchloom.preparation.settings.overlong_policy import OverlongPolicy
from batchloom.preparation.settings.recipe import Dtype
from batchloom.text import CleanStep


class DocumentOptions(TypedDict, total=False):
    """Settings that determine how documents are read; None is unset."""

    tokenizer: str | None
    end_token: str | None
    text_field: str | None
    mapping: Mapping[str, str] | None
    ignore: str | Sequence[str] | None
    split_on: str | None
    normalize: bool | None
    media: MediaRecipe | Mapping[str, Any] | None
    max_bad: int | str | None
    template: str | None
    train_on: TrainOn | None
    max_tokens: int | None
    follow_links: bool | None


class StreamedOptions(DocumentOptions, total=False):
    """Settings of documents that are tokenized during training; None is unset."""

    clean: Sequence[CleanStep | str | Mapping[str, Any]] | None
    dtype: Dtype | None
    val_fraction: float | None
    test_fraction: float | None


class PrepareOptions(StreamedOptions, total=False):
    """Settings of a store; None is unset."""

    fim: FimRecipe | float | Mapping[str, Any] | None
    dedup: DedupRecipe | str | Mapping[str, Any] | None
    tokens_per_shard: int | None
    balance_subsets: bool | None
    overlong: OverlongPolicy | None
    prove: bool | None


def check_option_names(function: str, options: Mapping[str, object], declared: type) -> None:
    """Raise ``TypeError`` for an undeclared keyword argument; name the nearest.

    Args:
        function: name of the called function.
        options: the given keyword arguments.
        declared: the ``TypedDict`` that declares them.
    """
    names = declared.__annotations__
    for name in options:
        if name not in names:
            raise TypeError(f"{function}() has no argument {name!r}{suggest(name, names)}")
