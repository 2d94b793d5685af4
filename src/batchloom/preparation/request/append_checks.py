"""What cannot be appended to a store: refused before any work is done."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchloom.core.errors import InputError, StoreConflictError
from batchloom.core.synthetic_data import SYNTHETIC
from batchloom.preparation.documents import RecordParsers, describe_preferences
from batchloom.preparation.settings import Recipe, compute_processor_fingerprint, recipe_to_plain
from batchloom.sources.files import Source
from batchloom.store import Manifest
from batchloom.store.format import choose_token_dtype
from batchloom.tokens import resolve_tokenizer


def check_base_has_recipe(base: Manifest, out: Path) -> None:
    """Refuse to append by the recipe of a store that has none.

    Raises:
        StoreConflictError: its documents were made up.
        InputError: they were imported.
    """
    if base.recipe.get("source") == SYNTHETIC:
        raise StoreConflictError(
            f"{out} holds data that was made up, to which nothing is appended; choose another --out."
        )
    if "reading" not in base.recipe:
        raise InputError(
            f"{out} was imported, so it has no recipe to append by; give one with --recipe FILE, and in it `tokenizer: "
            f"{out}`."
        )


def check_same_recipe(
    recipe: Recipe, base: Manifest, out: Path, kept: Mapping[str, Any] | None = None
) -> None:
    """Refuse to append by a recipe whose documents would not fit those that are there.

    Args:
        recipe: of what is to be appended.
        base: the newest generation.
        out: the store.
        kept: the state of the tokenizer, where the store itself named it.

    Raises:
        StoreConflictError: names the setting that differs.
        TokenizerError: the tokenizer that was asked for cannot be found.
    """
    if base.recipe.get("source") == SYNTHETIC:
        check_base_has_recipe(base, out)
    for name in ("val_fraction", "test_fraction"):
        then, now = base.recipe.get(name), getattr(recipe, name)
        if then is not None and then != now:
            raise StoreConflictError(
                f"{out} was prepared with {name} {then:g}, and would be appended to with {now:g}: equal documents "
                "could then be on two sides; leave the option out."
            )
    if kept is None and _is_other_tokenizer(recipe, base):
        raise StoreConflictError(
            f"{out} is of tokenizer {base.tokenizer.name}, and {recipe.tokenizer} is another: a store is of one. Leave "
            "the option out, or prepare another store."
        )
    if (named := _processor_fingerprint(recipe)) != (base.processor and base.processor.fingerprint):
        then = base.processor.name if base.processor else "none"
        now = "none" if named is None else "another"
        raise StoreConflictError(
            f"{out} is of processor {then}, and would be appended to with {now}: media of one store go into one model. "
            "Give the processor it was made with (--processor), or prepare another store."
        )
    if choose_token_dtype(recipe.dtype, base.tokenizer.vocab_size) != base.dtype:
        raise StoreConflictError(
            f"{out} is of dtype {base.dtype}, and would be appended to with dtype {recipe.dtype}: a store is of one; "
            f"give --dtype {base.dtype}."
        )


def _processor_fingerprint(recipe: Recipe) -> str | None:
    """The fingerprint of the processor of a recipe; None where it has none."""
    media = recipe.reading.media
    return None if media is None else compute_processor_fingerprint(media.processor)


def _is_other_tokenizer(recipe: Recipe, base: Manifest) -> bool:
    """Whether the tokenizer that a recipe names is another than the store's."""
    then = base.recipe
    named = (recipe_to_plain(recipe)["tokenizer"], recipe.end_token)
    is_file = Path(recipe.tokenizer).expanduser().exists()
    if named == (then.get("tokenizer"), then.get("end_token")) and not is_file:
        return False
    if recipe.tokenizer.startswith("train:"):
        return True
    found = resolve_tokenizer(recipe.tokenizer, end_token=recipe.end_token)
    return found.fingerprint != base.tokenizer.fingerprint


def check_same_preferences(
    sources: Sequence[Source], readings: RecordParsers, base: Manifest | None, out: Path
) -> None:
    """Preferences stand alone, in all generations of a store.

    Raises:
        InputError: names the first source of another kind.
    """
    for source in sources if base is not None else ():
        kind = readings.kind_of(source)
        if base is not None and kind is not None and kind != base.preferences:
            raise InputError(
                f"{source.name} holds {describe_preferences(kind)}, and {out} "
                f"{describe_preferences(base.preferences)}: a store holds preferences "
                "of one kind and nothing else. Prepare them into a store of their own."
            )
