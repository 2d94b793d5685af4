"""The settings of reading: which columns hold what, and what a document of a text file is."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from batchloom.chat.mapping import mapping_problems
from batchloom.core.spec import is_switch, is_text, shown
from batchloom.sources.rules import SPLIT_WORDS, Limits, ReadRules


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRecipe:
    r"""How records and text files are read.

    What is wrong with one is told by the recipe that holds it, with all else that is wrong.

    Attributes:
        text_field: field of a record, or column of a table, that holds the text; None where the
            schema is told from the records themselves.
        mapping: role to column, where detection is to be overruled (``{"prompt": "q"}``).
        split_on: what a document of a text file is: ``auto`` (a file; a plain-text file above
            1 MiB is cut into documents of about 64 KiB), ``file``, ``line``, ``paragraph``, or
            a marker: any other string, at which texts are cut and which is removed.
        normalize: whether text is brought to Unicode NFC with ``\n`` newlines.
    """

    text_field: str | None = None
    mapping: Mapping[str, str] = field(default_factory=dict)
    split_on: str = "auto"
    normalize: bool = True

    def rules(self, limits: Limits) -> ReadRules:
        """What the sources need to know of it."""
        return ReadRules(self.text_field or "text", self.split_on, limits)

    def problems(self) -> list[str]:
        """What is wrong with these values, by the names ``prepare`` takes them under."""
        problems = column_problems(self.text_field, self.mapping)
        if not is_text(self.split_on):
            problems.append(not_a_word("split_on", self.split_on))
        if not is_switch(self.normalize):
            problems.append(f"normalize: {shown(self.normalize)} is neither True nor False")
        return problems + _split_problems(self.split_on)


def column_problems(text_field: object, mapping: object) -> list[str]:
    """What is wrong with columns that are named for a text or for roles."""
    if not isinstance(mapping, Mapping):
        problems = [f"mapping: {shown(mapping)} is no mapping of roles to columns"]
    elif mapping and text_field is not None:
        problems = ["text_field: goes with no mapping; give mapping={'text': ...} alone"]
    else:
        problems = list(mapping_problems(mapping))
    if text_field is not None and not is_text(text_field):
        problems.append(not_a_word("text_field", text_field))
    return problems


def not_a_word(name: str, value: object) -> str:
    """The problem of a setting that should be a word."""
    return f"{name}: {shown(value)} is not a word; give one or more Unicode characters"


def _split_problems(split_on: object) -> list[str]:
    word = split_on.lower().rstrip("s") if isinstance(split_on, str) else ""
    if word not in SPLIT_WORDS or split_on in SPLIT_WORDS:
        return []
    return [f"split_on: {shown(split_on)} is not known; did you mean {word!r}?"]
