"""Location of settings: their file, and the resolution of its paths."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from batchloom.core.errors import InputError
from batchloom.core.settings import quote_value


class FileSetting(NamedTuple):
    """Setting that a file of another library states, with its key there."""

    value: Any
    key: str
    file: str


@dataclass(frozen=True, slots=True)
class ConfigLocation:
    """Location that a DatasetConfig was read from; without a file it is from Python.

    Attributes:
        file: the YAML file.
        block: path of its settings in the file, with a final dot; empty for the complete file.
        has_block: whether it states packing settings; False for a bare list.
        notes: notes about the file, one sentence each.
        recipe: whether it is a recipe, whose paths are not confined to its folder.
        entry_names: names of the data sets in messages; empty for their numbers.
        settings: settings of the recipe that the file of another library states.
        column_keys: keys of the file that name columns, for messages.
        job: file that was given, if it names the data sets of ``file``.
    """

    file: Path | None = None
    block: str = ""
    has_block: bool = True
    notes: tuple[str, ...] = ()
    recipe: bool = False
    entry_names: tuple[str, ...] = ()
    settings: Mapping[str, FileSetting] = field(default_factory=dict)
    column_keys: str = "mapping:"
    job: Path | None = None

    @property
    def name(self) -> str:
        """Name of the given file in messages; empty without one."""
        return str(self.job or self.file or "")

    def describe(self, key_path: str) -> str:
        """Return the name of a key in messages; empty without a file."""
        return "" if self.file is None else f"{self.file}: {key_path}"

    def with_note(self, note: str) -> "ConfigLocation":
        """Return a copy with one more note."""
        return replace(self, notes=(*self.notes, f"{self.file}: {note}."))

    def resolve_path(self, name: str) -> str:
        """Return a name as a path in the file's folder if it exists there, else as it is."""
        if self.file is None or os.path.isabs(name):  # noqa: PTH117
            return name
        path = self.file.parent / name
        # Without the dot, ./gpt2 would be a tokenizer name.
        if not path.exists() or (self.recipe and self.file.parent == Path()):
            return name
        if self.recipe:
            return str(path)
        if ".." in path.parts[len(self.file.parent.parts) :] or not path.resolve().is_relative_to(
            self.file.parent.resolve()
        ):
            raise InputError(
                f"{self.describe(self.block)}processor_config.processor_name: {quote_value(name)} lies outside of the "
                "folder of the manifest; put it there, or write its path out in full, from its / on."
            )
        return str(path)
