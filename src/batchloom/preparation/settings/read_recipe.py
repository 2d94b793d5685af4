"""Settings of reading: columns, documents of text files, and fill-in-the-middle."""

import codecs
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from batchloom.chat import parse_mapping
from batchloom.chat.schema import find_mapping_problems
from batchloom.core.errors import SettingsError
from batchloom.core.settings import (
    Setting,
    WrittenForm,
    build_settings,
    find_problems,
    is_positive_number,
    is_text,
    quote_value,
    to_plain,
)
from batchloom.preparation.settings.clean_recipe import clean_steps_to_settings, parse_clean_steps
from batchloom.preparation.settings.media_recipe import MediaRecipe, parse_media
from batchloom.sources import SPLIT_PROBLEM, DeclaredInput, ReadLimits, ReadRules, parse_split
from batchloom.sources.formats import SPLIT_WORDS, InputFormat
from batchloom.text import KNOWN_STEPS, CleanStep, find_clean_problems

_SENTINELS = ("prefix", "suffix", "middle")
_MAX_SEED = (1 << 128) - 1
# A setting that is written only if it is not the default.
_OmittedSetting = partial(Setting, omit_default=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FimRecipe:
    """Settings of fill-in-the-middle, which moves the middle of a text to its end.

    See Bavarian et al. 2022. The recipe that holds it reports its problems.
    """

    # 1 and 1.0 are one recipe and must have one fingerprint.
    rate: Annotated[float, Setting(help="Share of the texts to transform.", maximum=1, plain=float)] = 0.5
    spm_rate: Annotated[
        float, _OmittedSetting(help="Share of those with the suffix first.", maximum=1, plain=float)
    ] = 0.5
    seed: Annotated[int, _OmittedSetting(help="Seed of the choice.", minimum=-_MAX_SEED, maximum=_MAX_SEED)] = 0
    prefix: Annotated[str | None, _OmittedSetting(help="Token before the prefix.")] = None
    suffix: Annotated[str | None, _OmittedSetting(help="Token before the suffix.")] = None
    middle: Annotated[str | None, _OmittedSetting(help="Token before the middle.")] = None

    @property
    def sentinels(self) -> tuple[str | None, ...]:
        """Tokens before prefix, suffix and middle."""
        return self.prefix, self.suffix, self.middle

    def problems(self) -> list[str]:
        """List the problems of the values, by the names ``prepare`` takes them under."""
        problems = find_problems(self, "fim.")
        sentinel_fields = [name for name in _SENTINELS if getattr(self, name) is not None]
        if sentinel_fields and len(sentinel_fields) < len(_SENTINELS):
            missing = ", ".join(name for name in _SENTINELS if name not in sentinel_fields)
            problems.append(f"fim.{sentinel_fields[0]}: alone is not enough; name {missing}, too, or none")
        if not problems and sentinel_fields and len(set(self.sentinels)) < len(_SENTINELS):
            problems.append("fim.prefix: prefix, suffix and middle must be three different tokens")
        return problems


def parse_fim(value: object) -> FimRecipe | None:
    """Parse fill-in-the-middle from a rate, settings or a FimRecipe; None for rate 0.

    Raises:
        SettingsError: unknown settings. The recipe reports problems of their values.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        value = build_settings(FimRecipe, value, "fim.")
    elif not isinstance(value, FimRecipe):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise SettingsError([f"fim: {quote_value(value)} is no rate; write 0.5, or {{rate: 0.5, ...}}"])
        value = FimRecipe(rate=value)
    return value if value.rate != 0 or value.problems() else None


def fim_to_plain(fim: FimRecipe) -> Any:
    """Return the plain value: the rate alone if everything else has its default."""
    plain = to_plain(fim)
    return plain["rate"] if len(plain) == 1 else plain


def parse_names(value: object) -> Any:
    """Parse names from ``NAME,NAME`` or a list; return other values unchanged."""
    if isinstance(value, str):
        return tuple(filter(None, (name.strip() for name in value.split(","))))
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, Mapping) else value


_TEXT_FIELD_CONFLICT = "text_field: cannot be combined with a mapping; name its column in the mapping: text=..."


def _find_names_problem(value: object, form: str) -> str:
    return "" if isinstance(value, tuple) and all(map(is_text, value)) else f"is no list of {form}"


_find_ignore_problem = partial(_find_names_problem, form="names; give columns or message keys")
_find_globs_problem = partial(_find_names_problem, form="globs; write *.jsonl,logs/*.txt")


def parse_carried(item: str) -> tuple[str, str]:
    """Return the name and the column of an item of ``carry``."""
    name, equals, column = (part.strip() for part in item.partition("="))
    return (name, column) if equals else (name, name)


def _find_carry_problem(carry: Any) -> str:
    if problem := _find_names_problem(carry, "columns; write NAME or NAME=COLUMN"):
        return problem
    items = [parse_carried(item) for item in carry]
    names = [name for name, _ in items]
    if not all(name and column for name, column in items):
        return "has an item without a name; write NAME or NAME=COLUMN"
    if "prompt" in names:
        return "names 'prompt', which holds the messages of the prompt; write another name before the ="
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        return f"names {duplicates[0]!r} twice; give each column a name of its own"
    return ""


def find_input_split_problem(split: str) -> str:
    """Return why a value names no split of an input; empty if it does."""
    try:
        parse_split(split)
    except SettingsError:
        return SPLIT_PROBLEM
    return ""


def normalize_encoding(name: str) -> str:
    """Return Python's name of an encoding of texts; empty for UTF-8.

    Raises:
        LookupError: there is none.
    """
    # Neither codecs of bytes, such as base64, nor of names, such as idna, read any text.
    "a".encode(name)
    codecs.getincrementaldecoder(name)("surrogateescape").decode(b"a")
    encoding = codecs.lookup(name).name
    return "" if encoding == "utf-8" else encoding


def _find_encoding_problem(name: str) -> str:
    try:
        normalize_encoding(name)
    except (LookupError, ValueError):
        return "is no encoding of texts that Python knows; write one such as gb18030, shift_jis, cp1252 or utf-16"
    return ""


def _find_split_problem(split_on: object) -> str:
    if not is_text(split_on):
        return "is not a text of one or more Unicode characters"
    word = str(split_on).lower().rstrip("s")
    if word not in SPLIT_WORDS or split_on in SPLIT_WORDS:
        return ""
    return f"is not known; did you mean {word!r}?"


# Names from a text with commas or a list.
_NamesSetting = partial(Setting, parse=parse_names, keyword=str | Sequence[str], omit_default=True)
_NamesOption = partial(_NamesSetting, option_type=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRecipe:
    r"""Settings of reading records and text files.

    The recipe that holds it reports its problems.
    """

    text_field: Annotated[
        str | None, Setting(help="Field of a record that holds the text.", shown_default="detected from the records")
    ] = None
    mapping: Annotated[
        Mapping[str, str],
        Setting(
            help="Columns of the records by role, instead of the detected ones: prompt=q,response=a.",
            check=lambda _: "",
            option="--map",
            option_type=str,
            parse=lambda value: parse_mapping(value) if isinstance(value, str) else value,
            keyword=Mapping[str, str] | str,
        ),
    ] = field(default_factory=dict)
    ignore: Annotated[
        tuple[str, ...],
        _NamesOption(
            help="Columns and message keys to treat as absent, separated by commas: lang,score.",
            check=_find_ignore_problem,
        ),
    ] = ()
    input_split: Annotated[
        str | None,
        Setting(
            help="Split of the data sets in folders, archives and on the Hub: a name, all, CONFIG/SPLIT, or rows of it "
            "(train[:1%], train[1000:2000]).",
            check=find_input_split_problem,
            shown_default="train, or the only one",
            omit_default=True,
        ),
    ] = None
    val_from: Annotated[
        str | None,
        Setting(
            help="Split of the inputs that becomes the val subset; it replaces --val-fraction.",
            check=find_input_split_problem,
            shown_default="no split",
            omit_default=True,
        ),
    ] = None
    encoding: Annotated[
        str | None,
        Setting(
            help="Encoding of text, JSON and CSV files: gb18030, shift_jis, cp1252, utf-16. In folders and archives it "
            "applies to files that are not valid UTF-8.",
            check=_find_encoding_problem,
            shown_default="utf-8",
            omit_default=True,
        ),
    ] = None
    include: Annotated[
        tuple[str, ...],
        _NamesOption(
            help="Files to read, as quoted globs separated by commas: '*.jsonl,logs'. A glob without a slash matches "
            "the name of a file or folder, another one the end of a path.",
            check=_find_globs_problem,
            shown_default="all",
        ),
    ] = ()
    exclude: Annotated[
        tuple[str, ...],
        _NamesOption(
            help="Files to leave out, also those that are named, in the form of --include.",
            check=_find_globs_problem,
            shown_default="none",
        ),
    ] = ()
    allow_skipped: Annotated[
        bool,
        Setting(
            help="Go on if more than 1 % of the data files or bytes of a folder or archive cannot be read. They are "
            "left out, and listed in any case.",
            omit_default=True,
        ),
    ] = False
    prompts: Annotated[
        bool,
        Setting(
            help="Store only the prompts of the records, for trainers that generate the answers (GRPO).",
            omit_default=True,
        ),
    ] = False
    carry: Annotated[
        tuple[str, ...],
        _NamesOption(
            help="With --prompts: columns to store with each prompt for reward functions, separated by commas: "
            "answer,truth=reward_model.ground_truth.",
            check=_find_carry_problem,
        ),
    ] = ()
    split_on: Annotated[
        str,
        Setting(
            help="Part of a text file that becomes a document: auto (the file; a plain-text file above 1 MiB is cut at "
            "blank lines into documents of about 64 KiB), file, line, paragraph, or any other string, at which texts "
            r"are cut and which is removed (\n is a newline).",
            check=_find_split_problem,
            option_type=str,
        ),
    ] = "auto"
    normalize: Annotated[bool, Setting(help=r"Normalize text to Unicode NFC with \n newlines. Case is kept.")] = True
    clean: Annotated[
        tuple[CleanStep, ...],
        Setting(
            help=f"Cleaning steps, in order, separated by commas: {', '.join(KNOWN_STEPS)}. none removes those of a "
            "recipe.",
            check=lambda _: "",
            option_type=list,
            metavar="NAMES",
            shown_default="none",
            parse=parse_clean_steps,
            keyword=Sequence[CleanStep | str | Mapping[str, Any]],
            plain=clean_steps_to_settings,
        ),
    ] = ()
    fim: Annotated[
        FimRecipe | None,
        Setting(
            help="Share of the texts whose middle is put last (fill-in-the-middle), from 0 to 1.",
            check=lambda value: "" if isinstance(value, FimRecipe) else "is no Fim; give Fim(rate=0.5)",
            option_type=float,
            metavar="RATE",
            shown_default="0",
            parse=parse_fim,
            keyword=FimRecipe | float | Mapping[str, Any],
            plain=fim_to_plain,
            omit_default=True,
        ),
    ] = None
    media: Annotated[
        MediaRecipe | None,
        WrittenForm(parse=parse_media, keyword=MediaRecipe | Mapping[str, Any], omit_default=True),
    ] = None

    @property
    def carried_columns(self) -> dict[str, str] | None:
        """Columns that prompts carry, by name; None if records are read completely."""
        return dict(map(parse_carried, self.carry)) if self.prompts else None

    def rules(self, limits: ReadLimits) -> ReadRules:
        """Return the rules that sources need."""
        return ReadRules(self.text_field or "text", self.split_on, limits)

    def problems(self) -> list[str]:
        """List the problems of the values, by the names ``prepare`` takes them under."""
        problems = find_problems(self) + check_column_settings(None, self.mapping)
        if self.mapping and self.text_field is not None:
            problems.append(_TEXT_FIELD_CONFLICT)
        if self.carry and not self.prompts:
            problems.append("carry: only prompts carry columns; give prompts, too")
        if self.prompts and self.text_field is not None:
            problems.append("text_field: goes with no prompts; name the column of the prompt with mapping")
        if not isinstance(self.clean, tuple) or any(not isinstance(step, CleanStep) for step in self.clean):
            problems.append(f"clean: {quote_value(self.clean)} are no steps; give a tuple of CleanStep")
        else:
            problems += find_clean_problems(self.clean)
        if isinstance(self.fim, FimRecipe):
            problems += self.fim.problems()
        media: object = self.media
        if isinstance(media, MediaRecipe):
            problems += media.problems()
        elif media is not None:
            problems.append(f"media: {quote_value(media)} is no MediaRecipe; give MediaRecipe(processor=...)")
        return problems


# Far above any number of records.
MAX_SAMPLES = 10**15


def parse_path(value: object) -> object:
    """Return a path as text; other values unchanged."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def parse_folder(value: object) -> object:
    """Return a folder as text; None for an empty one."""
    return parse_path(value) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecipe:
    """Settings of one input; the recipe that holds it reports its problems.

    ``location`` names the setting in messages.
    """

    data_type: Annotated[InputFormat | None, _OmittedSetting(help="Format of the files.", shown_default="detected")] = (
        None
    )
    name: Annotated[str | None, _OmittedSetting(help="Label of the documents; recorded in the store.")] = None
    weight: Annotated[
        float | None,
        _OmittedSetting(
            help="Share among the inputs, above 0; recorded in the store.",
            check=lambda value: "" if is_positive_number(value) else "is not a finite number above 0",
            # 2 and 2.0 are one weight.
            parse=lambda value: float(value) if is_positive_number(value) else value,
            plain=float,
        ),
    ] = None
    media_folder: Annotated[
        str | None,
        _OmittedSetting(
            help="Folder or URL that the paths of media start from; None for the recipe's.", parse=parse_folder
        ),
    ] = None
    text_field: Annotated[
        str | None,
        _OmittedSetting(help="Field of a record that holds the text. Without it and a mapping, the recipe's applies."),
    ] = None
    mapping: Annotated[
        Mapping[str, str],
        _OmittedSetting(
            help="Columns by role. Without it and a text_field, the recipe's mapping applies.", check=lambda _: ""
        ),
    ] = field(default_factory=dict)
    ignore: Annotated[
        tuple[str, ...],
        _NamesSetting(
            help="Columns and message keys to treat as absent, besides the recipe's.", check=_find_ignore_problem
        ),
    ] = ()
    split: Annotated[
        str | None,
        _OmittedSetting(
            help="Split of its data sets, as input_split; without it, the recipe's applies.",
            check=find_input_split_problem,
        ),
    ] = None
    encoding: Annotated[
        str | None,
        _OmittedSetting(help="Encoding of its texts; without it, the recipe's applies.", check=_find_encoding_problem),
    ] = None
    include: Annotated[
        tuple[str, ...],
        _NamesSetting(help="Globs of its files to read; without any, the recipe's apply.", check=_find_globs_problem),
    ] = ()
    exclude: Annotated[
        tuple[str, ...],
        _NamesSetting(
            help="Globs of its files to leave out; without any, the recipe's apply.", check=_find_globs_problem
        ),
    ] = ()
    subset: Annotated[
        Literal["train", "val", "test"] | None,
        _OmittedSetting(help="Subset of all its documents.", shown_default="chosen by the hash of each"),
    ] = None
    max_samples: Annotated[
        int | None, _OmittedSetting(help="Number of first records to read.", minimum=1, maximum=MAX_SAMPLES)
    ] = None
    num_samples: Annotated[
        int | None, _OmittedSetting(help="Number of random records to read.", minimum=1, maximum=MAX_SAMPLES)
    ] = None
    location: str = field(default="", compare=False)

    @property
    def declared_input(self) -> DeclaredInput:
        """The declaration that the listing needs."""
        return DeclaredInput(self.data_type, self.location)

    def problems(self) -> list[str]:
        """List the problems of the values, by name."""
        problems = check_column_settings(self.text_field, self.mapping) + find_problems(self)
        if not problems and self.split is not None and parse_split(self.split).rows is not None:
            problems += [
                f"split: rows and {name} cannot be combined; leave one of them out"
                for name in ("max_samples", "num_samples")
                if getattr(self, name) is not None
            ]
        return problems


def describe_unused_weights(sources: Sequence[SourceRecipe]) -> str:
    """Return the note about weights that are not used yet; empty if there are none."""
    weights = [source.weight for source in sources if source.weight is not None]
    if not weights:
        return ""
    inputs = "1 input" if len(weights) == 1 else f"{len(weights):,} inputs"
    return (
        f"Weights of {inputs} are recorded and not applied: documents of one store are drawn in proportion to their "
        "tokens. prepare --separate makes a store of each and the mixture that applies them (train --mixture)."
    )


def check_column_settings(text_field: object, mapping: object) -> list[str]:
    """List the problems of a column mapping, which excludes a text field."""
    if not isinstance(mapping, Mapping):
        return [f"mapping: {quote_value(mapping)} is no mapping of roles to columns"]
    if mapping and text_field is not None:
        return [_TEXT_FIELD_CONFLICT]
    return list(find_mapping_problems(mapping))
