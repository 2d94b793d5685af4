"""The settings of reading: which columns hold what, and what a document of a text file is."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchloom.chat.schema import find_mapping_problems
from batchloom.core.settings import is_bool, is_text, quote_value, suggest
from batchloom.preparation.settings.fim_recipe import FimRecipe
from batchloom.preparation.settings.media_recipe import MediaRecipe
from batchloom.sources import DeclaredInput, ReadLimits, ReadRules
from batchloom.sources.files import INPUT_FORMATS, SPLIT_WORDS, InputFormat
from batchloom.text import CleanStep, find_clean_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRecipe:
    r"""How records and text files are read.

    What is wrong with one is told by the recipe that holds it, with all else that is wrong.

    Attributes:
        text_field: field of a record, or column of a table, that holds the text; None where the
            schema is told from the records themselves.
        mapping: role to column, where detection is to be overruled (``{"prompt": "q"}``).
        ignore: columns and message keys that are treated as absent.
        split_on: what a document of a text file is: ``auto`` (a file; a plain-text file above
            1 MiB is cut into documents of about 64 KiB), ``file``, ``line``, ``paragraph``, or
            a marker: any other string, at which texts are cut and which is removed.
        normalize: whether text is brought to Unicode NFC with ``\n`` newlines.
        clean: the steps of cleaning, in the order they are taken.
        fim: texts whose middle is put last; None for none.
        media: how conversations with images and audio are read; None where they are refused.
    """

    text_field: str | None = None
    mapping: Mapping[str, str] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    split_on: str = "auto"
    normalize: bool = True
    clean: tuple[CleanStep, ...] = ()
    fim: FimRecipe | None = None
    media: MediaRecipe | None = None

    def rules(self, limits: ReadLimits) -> ReadRules:
        """What the sources need to know of it."""
        return ReadRules(self.text_field or "text", self.split_on, limits)

    def problems(self) -> list[str]:
        """What is wrong with these values, by the names ``prepare`` takes them under."""
        problems = check_column_settings(self.text_field, self.mapping)
        problems += _check_ignore(self.ignore)
        if not is_text(self.split_on):
            problems.append(describe_non_text("split_on", self.split_on))
        if not is_bool(self.normalize):
            problems.append(f"normalize: {quote_value(self.normalize)} is neither True nor False")
        if not isinstance(self.clean, tuple) or any(not isinstance(step, CleanStep) for step in self.clean):
            problems.append(f"clean: {quote_value(self.clean)} are no steps; give a tuple of CleanStep")
        else:
            problems += find_clean_problems(self.clean)
        fim: object = self.fim
        if isinstance(fim, FimRecipe):
            problems += fim.problems()
        elif fim is not None:
            problems.append(f"fim: {quote_value(fim)} is no Fim; give Fim(rate=0.5)")
        media: object = self.media
        if isinstance(media, MediaRecipe):
            problems += media.problems()
        elif media is not None:
            problems.append(f"media: {quote_value(media)} is no MediaRecipe; give MediaRecipe(processor=...)")
        return problems + _check_split_on(self.split_on)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecipe:
    """What is said of one input alone; what is wrong with it is told by the recipe that holds it.

    Attributes:
        text_field: as in :class:`ReadRecipe`; where neither this nor ``mapping`` is given, the
            recipe's count.
        mapping: as in :class:`ReadRecipe`.
        ignore: as in :class:`ReadRecipe`, besides what the recipe ignores in all inputs.
        form: what its files are: ``json``, ``jsonl``, ``csv``, ``parquet``, ``arrow`` or
            ``hf_dataset``; None: told by their names and contents.
        name: what its documents are called together; recorded in the store.
        weight: its share among the inputs, above 0; recorded in the store.
        location: where it was asked for, for messages.
    """

    text_field: str | None = None
    mapping: Mapping[str, str] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    form: InputFormat | None = None
    name: str | None = None
    weight: float | None = None
    location: str = field(default="", compare=False)

    @property
    def declared_input(self) -> DeclaredInput:
        """What the listing needs to know of it."""
        return DeclaredInput(self.form, self.location)

    def problems(self) -> list[str]:
        """What is wrong with these values, by their names."""
        problems = check_column_settings(self.text_field, self.mapping)
        problems += _check_ignore(self.ignore)
        if self.form is not None and self.form not in INPUT_FORMATS:
            hint = suggest(str(self.form), INPUT_FORMATS)
            problems.append(f"form: {quote_value(self.form)} is none of {', '.join(INPUT_FORMATS)}{hint}")
        if self.name is not None and not is_text(self.name):
            problems.append(describe_non_text("name", self.name))
        if self.weight is not None and not is_weight(self.weight):
            problems.append(f"weight: {quote_value(self.weight)} is not a finite number above 0")
        return problems


def is_weight(value: object) -> bool:
    """Whether a value can be a share among others."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return 0 < float(value) < math.inf
    except OverflowError:
        return False


def source_to_plain(source: SourceRecipe, *, include_labels: bool) -> dict[str, Any]:
    """What is said of one input as the manifest holds it: what is not said is left out.

    What its files were read as stands with the files.

    Args:
        source: what is said.
        include_labels: with its name and weight, which decide no document.
    """
    settings: dict[str, Any] = {
        "text_field": source.text_field,
        "mapping": dict(source.mapping),
        "ignore": list(source.ignore),
    }
    if include_labels:
        settings |= {"name": source.name, "weight": source.weight and float(source.weight)}
    return {name: value for name, value in settings.items() if value}


def sources_to_plain(sources: Sequence[SourceRecipe], *, include_labels: bool = True) -> list[dict[str, Any]]:
    """What is said of each input; of no input where nothing is said of any."""
    plain = [source_to_plain(source, include_labels=include_labels) for source in sources]
    return plain if any(plain) else []


def describe_unused_weights(sources: Sequence[SourceRecipe]) -> str:
    """What to say of weights that nothing uses yet; empty where there are none."""
    weights = [source.weight for source in sources if source.weight is not None]
    if not weights:
        return ""
    inputs = "1 input" if len(weights) == 1 else f"{len(weights):,} inputs"
    return (
        f"Weights of {inputs} are recorded and not applied: documents of one store are drawn in proportion to their "
        "tokens; stores of their own can be mixed (train --mixture)."
    )


def check_column_settings(text_field: object, mapping: object) -> list[str]:
    """What is wrong with columns that are named for a text or for roles."""
    if not isinstance(mapping, Mapping):
        problems = [f"mapping: {quote_value(mapping)} is no mapping of roles to columns"]
    elif mapping and text_field is not None:
        problems = ["text_field: goes with no mapping; give mapping={'text': ...} alone"]
    else:
        problems = list(find_mapping_problems(mapping))
    if text_field is not None and not is_text(text_field):
        problems.append(describe_non_text("text_field", text_field))
    return problems


def _check_ignore(ignore: object) -> list[str]:
    if isinstance(ignore, tuple) and all(map(is_text, ignore)):
        return []
    return [f"ignore: {quote_value(ignore)} is no list of names; give columns or message keys"]


def describe_non_text(name: str, value: object) -> str:
    """The problem of a setting that should be a word."""
    return f"{name}: {quote_value(value)} is not a word; give one or more Unicode characters"


def _check_split_on(split_on: object) -> list[str]:
    word = split_on.lower().rstrip("s") if isinstance(split_on, str) else ""
    if word not in SPLIT_WORDS or split_on in SPLIT_WORDS:
        return []
    return [f"split_on: {quote_value(split_on)} is not known; did you mean {word!r}?"]
