"""Checks that refuse an append before any work is done."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchloom.core.errors import InputError, StoreConflictError
from batchloom.core.synthetic_data import SYNTHETIC
from batchloom.preparation.documents.record_parsers import RecordParsers, describe_preferences
from batchloom.preparation.settings.media_recipe import compute_processor_fingerprint
from batchloom.preparation.settings.recipe import Recipe, recipe_to_plain
from batchloom.sources.files import Source
from batchloom.store import Manifest
from batchloom.store.format import choose_token_dtype
from batchloom.tokens import resolve_tokenizer


def check_base_has_recipe(base: Manifest, out: Path) -> None:
    """Refuse to append to a store that has no recipe.

    Raises:
        StoreConflictError: its documents are synthetic.
        InputError: its documents were imported.
    """
    if base.recipe.get("source") == SYNTHETIC:
        raise StoreConflictError(f"{out} holds synthetic data, which cannot be appended to; choose another --out.")
    if "reading" not in base.recipe:
        raise InputError(
            f"{out} was imported and has no recipe, which an append needs; give one with --recipe FILE that sets "
            f"`tokenizer: {out}`."
        )


def check_same_recipe(
    recipe: Recipe, base: Manifest, out: Path, tokenizer_state: Mapping[str, Any] | None = None
) -> None:
    """Refuse to append with a recipe whose documents would not match the store.

    Args:
        recipe: recipe of the new documents.
        base: newest generation of the store.
        out: folder of the store.
        tokenizer_state: state of the tokenizer, if it comes from the store.

    Raises:
        StoreConflictError: the message names the setting that differs.
        TokenizerError: the tokenizer is not found.
    """
    if base.recipe.get("source") == SYNTHETIC:
        check_base_has_recipe(base, out)
    for name in ("val_fraction", "test_fraction"):
        stored_value, requested_value = base.recipe.get(name), getattr(recipe, name)
        if stored_value is not None and stored_value != requested_value:
            raise StoreConflictError(
                f"{out} was prepared with {name} {stored_value:g}, but {requested_value:g} is requested: equal "
                "documents could be in two subsets; leave the option out."
            )
    if tokenizer_state is None and _is_other_tokenizer(recipe, base):
        raise StoreConflictError(
            f"{out} has tokenizer {base.tokenizer.name}, but {recipe.tokenizer} is requested: a store has one "
            "tokenizer. Leave the option out, or prepare another store."
        )
    if (processor_fingerprint := _get_processor_fingerprint(recipe)) != (base.processor and base.processor.fingerprint):
        stored_value = base.processor.name if base.processor else "none"
        requested_value = "none" if processor_fingerprint is None else "another"
        raise StoreConflictError(
            f"{out} has processor {stored_value}, but {requested_value} is requested: a store has one processor. "
            "Give the processor it was made with (--processor), or prepare another store."
        )
    if choose_token_dtype(recipe.dtype, base.tokenizer.vocab_size) != base.dtype:
        raise StoreConflictError(
            f"{out} has dtype {base.dtype}, but dtype {recipe.dtype} is requested: a store has one dtype; "
            f"give --dtype {base.dtype}."
        )


def _get_processor_fingerprint(recipe: Recipe) -> str | None:
    """Return the fingerprint of a recipe's processor; None if it has none."""
    media = recipe.reading.media
    return None if media is None else compute_processor_fingerprint(media.processor)


def _is_other_tokenizer(recipe: Recipe, base: Manifest) -> bool:
    """Return whether a recipe names another tokenizer than the store's."""
    stored_recipe = base.recipe
    requested_names = (recipe_to_plain(recipe)["tokenizer"], recipe.end_token)
    is_file = Path(recipe.tokenizer).expanduser().exists()
    if requested_names == (stored_recipe.get("tokenizer"), stored_recipe.get("end_token")) and not is_file:
        return False
    if recipe.tokenizer.startswith("train:"):
        return True
    tokenizer = resolve_tokenizer(recipe.tokenizer, end_token=recipe.end_token)
    return tokenizer.fingerprint != base.tokenizer.fingerprint


def check_same_preferences(
    sources: Sequence[Source], record_parsers: RecordParsers, base: Manifest | None, out: Path
) -> None:
    """Refuse to mix preferences with other documents, in all generations of a store.

    Raises:
        InputError: the message names the first source of another kind.
    """
    for source in sources if base is not None else ():
        kind = record_parsers.get_preference_kind(source)
        if base is not None and kind is not None and kind != base.preferences:
            raise InputError(
                f"{source.name} holds {describe_preferences(kind)}, and {out} "
                f"{describe_preferences(base.preferences)}: a store of preferences holds one "
                "kind and no other documents. Prepare them into a separate store."
            )
