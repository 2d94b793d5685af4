"""The recipe of ``prepare``: its settings, short forms, plain form and keywords."""

import datetime as dt
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import partial
from itertools import chain, islice
from typing import Annotated, Any, Literal, Protocol, get_args

from batchloom.chat import NO_TEMPLATE
from batchloom.chat.templates import (
    DEFAULT_DATE,
    ReasoningPolicy,
    ToolArguments,
    TrainOnEos,
    find_argument_problems,
    find_train_on_problem,
    parse_template_arguments,
)
from batchloom.core.errors import SettingsError
from batchloom.core.settings import (
    Setting,
    WrittenForm,
    as_int,
    build_settings,
    find_problems,
    find_unknown_settings,
    is_text,
    list_setting_names,
    quote_value,
    raise_problems,
    suggest,
    to_plain,
)
from batchloom.plan import PlanSpec
from batchloom.preparation.dedup.line_dedup import RepeatUnit
from batchloom.preparation.dedup.near_duplicates import MINHASH_VERSION, choose_banding
from batchloom.preparation.settings.read_recipe import ReadRecipe, SourceRecipe
from batchloom.sources import SplitRequest, parse_split
from batchloom.store.format import Banding

OverlongPolicy = Literal["drop", "truncate", "truncate-left", "truncate-turns", "split", "error"]
OVERLONG_POLICIES: tuple[str, ...] = get_args(OverlongPolicy)
# Policies that cut tokens off one end of a conversation.
TRUNCATIONS = ("truncate", "truncate-left")

ChatSetting = partial(Setting, panel="Conversations")
_DATE_CHARACTERS = len("YYYY-MM-DD")


DedupMode = Literal["none", "exact", "lines", "paragraphs", "near"]

_BANDING_FIELDS = ("bands", "rows")
_MAX_HASHES = 4096
_MAX_SHINGLE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupRecipe:
    """Settings of deduplication; the first copy in input order is kept.

    The recipe that holds it reports its problems.
    """

    mode: Annotated[
        DedupMode,
        Setting(
            help="Duplicates to remove, keeping the first copy: exact (documents), lines, paragraphs, near (similar "
            "documents) or none (also --no-dedup).",
            option="--dedup",
            shown_default="exact; none with --split-on line or paragraph",
        ),
    ] = "exact"
    bands: Annotated[
        int, Setting(help="Bands of the MinHash signatures.", minimum=1, maximum=_MAX_HASHES, has_option=False)
    ] = 14
    rows: Annotated[
        int,
        Setting(
            help="Hashes of a band. A pair of similarity s is found with probability 1 - (1 - s^rows)^bands.",
            minimum=1,
            maximum=_MAX_HASHES,
            has_option=False,
        ),
    ] = 8
    shingle: Annotated[
        int,
        Setting(help="Consecutive tokens that are hashed together.", minimum=1, maximum=_MAX_SHINGLE, has_option=False),
    ] = 5
    similarity: Annotated[
        float | None,
        Setting(
            help="With --dedup near: share of common token runs from which documents count as near duplicates. Nine "
            "of ten pairs that are this similar are found.",
            maximum=1,
            shown_default="0.8",
        ),
    ] = None
    keep_signatures: Annotated[
        bool,
        Setting(
            help="Keep the signatures in the store (8 bytes a band and document), so that appended documents are "
            "compared with all of its documents.",
            has_option=False,
        ),
    ] = True

    @property
    def banding(self) -> Banding:
        """Parameters of the MinHash signatures."""
        similarity = self.similarity
        bands, rows = (self.bands, self.rows) if similarity is None else choose_banding(similarity)
        return Banding(bands, rows, self.shingle, MINHASH_VERSION)

    @property
    def stored_banding(self) -> Banding | None:
        """Parameters of the signatures that a store keeps; None if it keeps none."""
        if self.mode != "near" or not self.keep_signatures:
            return None
        return self.banding

    @property
    def repeat_unit(self) -> RepeatUnit | None:
        """Unit of repetition inside documents; None to remove only complete documents."""
        return self.mode if self.mode in ("lines", "paragraphs") else None

    def problems(self) -> list[str]:
        """List the problems of the values, by the names ``prepare`` takes them under."""
        problems = find_problems(self, "dedup.")
        if problems:
            return [problem.replace("dedup.mode:", "dedup:") for problem in problems]
        defaults = DedupRecipe()
        changed = [field.name for field in fields(self) if getattr(self, field.name) != getattr(defaults, field.name)]
        if self.mode != "near":
            return [
                f"dedup.{name}: belongs to mode near, and mode is {quote_value(self.mode)}; leave it out"
                for name in changed
                if name != "mode"
            ]
        if self.similarity is not None:
            try:
                choose_banding(self.similarity)
            except SettingsError as error:
                return list(error.problems)
            return [
                f"dedup.similarity: bands and rows follow from it, and {name} is given; leave one of them out"
                for name in _BANDING_FIELDS
                if name in changed
            ][:1]
        if self.bands * self.rows > _MAX_HASHES:
            return [f"dedup.bands: {self.bands} of {self.rows} rows make more than {_MAX_HASHES:,} hashes; lower one"]
        return []


def parse_dedup(value: object) -> DedupRecipe:
    """Parse deduplication from a mode, settings with a mode, or a DedupRecipe.

    Raises:
        SettingsError: unknown settings, or another type. The recipe reports problems of
            their values.
    """
    if isinstance(value, DedupRecipe):
        return value
    if not isinstance(value, Mapping):
        return DedupRecipe(mode=value)  # type: ignore[arg-type]  # the recipe checks it
    missing = [] if value.get("mode") is not None else ["dedup.mode: missing; write {mode: near, ...}"]
    raise_problems(find_unknown_settings(value, list_setting_names(DedupRecipe), "dedup.") + missing)
    return build_settings(DedupRecipe, value, "dedup.")


def dedup_to_plain(dedup: DedupRecipe) -> str | dict[str, Any]:
    """Return the plain value: the mode alone if everything else has its default."""
    if dedup.mode != "near":
        return dedup.mode
    plain = to_plain(dedup)
    # Derived settings are left out, so that the result can be parsed again.
    derived_fields = ("similarity",) if dedup.similarity is None else ("bands", "rows")
    return {name: value for name, value in plain.items() if name not in derived_fields}


Dtype = Literal["auto", "uint16", "int32"]

# Bounds the memory of a shard's index and provenance, for any document lengths.
SHARD_DOCUMENTS = 1 << 20
# Far above any shard or input; token counts are stored in 64 bits.
MAX_SHARD_TOKENS = 10**12
_MAX_BAD_COUNT = 10**18
_BAD_BUDGET_PATTERN = r"[0-9]{1,30}|[0-9]{1,30}(\.[0-9]{1,30})?%"
_SIZE_CHARACTERS = 40
_SIZE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def parse_token_count(value: object) -> object:
    """Parse a number of tokens from ``100M``, ``1.5G`` or ``100_000``.

    Other values are returned unchanged.

    Raises:
        SettingsError: a text that is no such number.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([\d_,]*\d(?:\.\d+)?)\s*([KMG]?)", value.strip().upper())
    if match is None or len(value) > _SIZE_CHARACTERS:
        hint = f"a size of at most {_SIZE_CHARACTERS} characters such as 100M, 1G or 100_000"
        raise SettingsError([f"tokens_per_shard: {quote_value(value)} is not {hint}"])
    return round(Fraction(re.sub("[_,]", "", match[1])) * _SIZE_UNITS[match[2]])


def format_token_count(size: int) -> int | str:
    """Return the shortest form of a size that is exact."""
    fitting = [unit for unit, factor in _SIZE_UNITS.items() if unit and size and size % factor == 0]
    return f"{size // _SIZE_UNITS[fitting[-1]]}{fitting[-1]}" if fitting else size


def _parse_date(value: object) -> dt.date | None:
    try:
        return dt.date.fromisoformat(value) if isinstance(value, str) and len(value) == _DATE_CHARACTERS else None
    except ValueError:
        return None


def _format_date(value: object) -> object:
    """Return a date as text; the recipe checks other values."""
    return value.isoformat() if isinstance(value, dt.date) and not isinstance(value, dt.datetime) else value


def _find_tool_format_problem(value: object) -> str:
    if value == "default":
        return ""
    return "is not default, the only format; leave it out for a template that writes tools (--template chatml)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRecipe:
    """Settings of conversations."""

    template: Annotated[
        str | None,
        ChatSetting(
            help="Chat template: chatml, llama3, alpaca, plain, the name of a template of the tokenizer, or a file. "
            "none joins the texts of prompts and completions, for base models.",
            check=lambda value: "" if is_text(value) else "is no name; give one or a path",
            shown_default="the tokenizer's, else plain",
        ),
    ] = None
    template_args: Annotated[
        Mapping[str, Any],
        ChatSetting(
            help="Variable of the chat template (enable_thinking=false); the value is JSON, else text. Repeatable.",
            check=lambda _: "",
            option="--template-arg",
            option_type=list,
            metavar="NAME=VALUE",
            parse=parse_template_arguments,
            keyword=Mapping[str, Any] | Sequence[str],
            omit_default=True,
        ),
    ] = field(default_factory=dict)
    template_date: Annotated[
        str | None,
        ChatSetting(
            help="Date that the chat template writes, if it writes one: YYYY-MM-DD.",
            check=lambda value: "" if _parse_date(value) else "is no date; write YYYY-MM-DD",
            metavar="DATE",
            shown_default=DEFAULT_DATE.isoformat(),
            parse=_format_date,
            keyword=str | dt.date,
            omit_default=True,
        ),
    ] = None
    tool_format: Annotated[
        str | None,
        ChatSetting(
            help="default writes tools and tool calls into the contents of messages, as LLaMA-Factory does, for "
            "templates that write none.",
            check=_find_tool_format_problem,
            shown_default="the template's",
            omit_default=True,
        ),
    ] = None
    tool_arguments: Annotated[
        ToolArguments,
        ChatSetting(
            help="Form in which the template gets the arguments of tool calls: as-is, parse (JSON text becomes an "
            "object) or text (an object becomes JSON text).",
            omit_default=True,
        ),
    ] = "as-is"
    reasoning: Annotated[
        ReasoningPolicy,
        ChatSetting(
            help="Reasoning of answers: keep, mask (not trained), drop, or split (one sample for each answer, for "
            "templates that write the last reasoning alone).",
            omit_default=True,
        ),
    ] = "keep"
    default_system: Annotated[
        str | None,
        ChatSetting(
            help="System prompt of conversations without one. An empty text removes that of a recipe.",
            check=lambda value: "" if value == "" or is_text(value) else "is not a text of Unicode characters",
            metavar="TEXT",
            shown_default="the template's",
            omit_default=True,
        ),
    ] = None
    train_on: Annotated[
        str | None,
        ChatSetting(
            help="Turns to train on: assistant, all, last, completion, flagged, or roles such as assistant,tool.",
            check=find_train_on_problem,
            shown_default="assistant; completion for prompt-completion records",
        ),
    ] = None
    train_on_eos: Annotated[
        TrainOnEos,
        ChatSetting(
            help="Stop tokens to train on: turn (those of trained turns), all (those of all turns), last (that of the "
            "last trained turn) or none.",
            omit_default=True,
        ),
    ] = "turn"
    max_tokens: Annotated[
        int | None,
        ChatSetting(
            help="Maximum tokens of a conversation.",
            minimum=1,
            maximum=10**12,
            shown_default="no limit",
        ),
    ] = None
    overlong: Annotated[
        OverlongPolicy,
        ChatSetting(
            help="Policy for longer conversations: drop, truncate (keep the first tokens), truncate-left (keep the "
            "last ones), truncate-turns (keep complete turns), split or error."
        ),
    ] = "drop"
    prove: Annotated[bool, ChatSetting(help="Decode trained tokens and compare them with the text.")] = False

    def __post_init__(self) -> None:
        problems = find_problems(self)
        if self.default_system == "":
            object.__setattr__(self, "default_system", None)
        problems += [f"template_args: {problem}" for problem in find_argument_problems(self.template_args)]
        if self.template == NO_TEMPLATE:
            problems += [
                f"{name}: is for a chat template, and template is {NO_TEMPLATE}; leave one of them out"
                for name in ("template_args", "template_date", "tool_format", "default_system")
                if getattr(self, name)
            ]
        if self.overlong in OVERLONG_POLICIES[1:] and self.max_tokens is None:
            problems.append(
                f"overlong: {quote_value(self.overlong)} is for conversations of more than max_tokens, which is not "
                "given; add --max-tokens N, or leave --overlong out"
            )
        if self.reasoning == "split" and self.train_on not in (None, "assistant", "last", "completion", "flagged"):
            problems.append(
                f"reasoning: split makes samples of single answers, and train_on {quote_value(self.train_on)} trains "
                "more than answers; train on assistant, or choose another policy for the reasoning"
            )
        if self.reasoning == "split" and self.train_on_eos == "all":
            problems.append(
                "reasoning: split trains an answer once, and train_on_eos all trains the stops of the turns before it "
                "in each sample; leave one of the two out"
            )
        if self.reasoning == "mask" and self.template == NO_TEMPLATE:
            problems.append(
                f"reasoning: mask needs the turns of a template, and template is {NO_TEMPLATE}; choose a template, or "
                "drop the reasoning"
            )
        raise_problems(problems)

    @property
    def date(self) -> dt.date:
        """Date that the template writes."""
        return _parse_date(self.template_date) or DEFAULT_DATE

    def resolve_train_on(self, *, completion: bool) -> "ChatRecipe":
        """Return the settings with ``train_on`` resolved.

        Its default depends on the completion that the records of a source have or lack.
        """
        return replace(self, train_on=self.train_on or ("completion" if completion else "assistant"))


class PretrainedTokenizer(Protocol):
    """A tokenizer of transformers, which ``prepare`` takes, too."""

    def save_pretrained(self, save_directory: Any) -> object:
        """Save it to a folder."""


def _find_tokenizer_problem(value: object) -> str:
    if not is_text(value):
        return "is not a text of one or more Unicode characters"
    return "holds a NUL, which no name can; leave it out" if "\0" in str(value) else ""


def _find_bad_budget_problem(value: object) -> str:
    count = as_int(value)
    if isinstance(value, str) and re.fullmatch(_BAD_BUDGET_PATTERN, value):
        share = _parse_bad_fraction(value)
        if share is not None and share <= 1:
            return ""
        count = int(value) if share is None else None
    if count is not None and 0 <= count <= _MAX_BAD_COUNT:
        return ""
    return f"is neither a number of records up to {_MAX_BAD_COUNT:,} nor a share up to 100% such as '0.1%'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings that make a store of inputs; equal recipes and inputs give equal bytes."""

    inputs: tuple[str, ...]
    sources: tuple[SourceRecipe, ...] = ()
    tokenizer: Annotated[
        str,
        Setting(
            help="Tokenizer: bytes, gpt2, train:N (learn N ids from the input), tiktoken:NAME, the path of a "
            "tokenizer.json or its folder, or a Hub id.",
            check=_find_tokenizer_problem,
            keyword=str | PretrainedTokenizer,
            shown_default="that of a manifest or processor, else gpt2",
        ),
    ] = "gpt2"
    end_token: Annotated[
        str | None,
        Setting(
            help="End-of-document token; config for the eos_token of tokenizer_config.json, as in TRL and Megatron.",
            shown_default="the tokenizer's",
        ),
    ] = None
    reading: ReadRecipe = field(default_factory=ReadRecipe)
    tokens_per_shard: Annotated[
        int,
        Setting(
            help="Maximum tokens of a shard (100M, 1G); a single longer document gets a shard of its own.",
            minimum=1,
            maximum=MAX_SHARD_TOKENS,
            option_type=str,
            metavar="SIZE",
            shown_default="100M",
            parse=parse_token_count,
            keyword=int | str,
        ),
    ] = 100_000_000
    dtype: Annotated[
        Dtype,
        Setting(
            help="Dtype of a token on disk: auto (uint16 below a vocabulary of 65,500, else int32), uint16, int32."
        ),
    ] = "auto"
    follow_links: Annotated[
        bool,
        Setting(
            help="Follow symbolic links that lead out of an input folder. Without it they are skipped and counted.",
            omit_default=True,
        ),
    ] = False
    val_fraction: Annotated[
        float, Setting(help="Share of the tokens in the val subset; complete documents are chosen by hash.", below=1)
    ] = 0.01
    test_fraction: Annotated[float, Setting(help="Share of the tokens in the test subset.", below=1)] = 0.0
    balance_subsets: Annotated[
        bool,
        Setting(
            help="Move single documents if a subset misses its share of the tokens by more than 20 %. Without it, "
            "hashes alone choose."
        ),
    ] = True
    dedup: Annotated[
        DedupRecipe,
        WrittenForm(parse=parse_dedup, keyword=DedupRecipe | str | Mapping[str, Any], plain=dedup_to_plain),
    ] = field(default_factory=DedupRecipe)
    max_bad: Annotated[
        int | str,
        Setting(
            help="Maximum bad records: a number, or a share of all records, which allows at least 10. Bad records are "
            "written to quarantine.jsonl.",
            check=_find_bad_budget_problem,
            option_type=str,
        ),
    ] = "0.1%"
    chat: ChatRecipe = field(default_factory=ChatRecipe)

    def __post_init__(self) -> None:
        raise_problems(_check_recipe(self))
        # Settings are compared once each has its type.
        raise_problems(_check_combinations(self))
        # 0 and 0.0 are one recipe and must have one fingerprint.
        object.__setattr__(self, "val_fraction", float(self.val_fraction))
        object.__setattr__(self, "test_fraction", float(self.test_fraction))

    def source(self, number: int) -> SourceRecipe:
        """Return the settings of one input."""
        return self.sources[number] if self.sources else SourceRecipe()

    def split(self, number: int) -> SplitRequest | None:
        """Return the split of the data sets of one input."""
        text = self.source(number).split or self.reading.input_split
        return None if text is None else parse_split(text)

    @property
    def val_split(self) -> SplitRequest | None:
        """The split that becomes the subset ``val``; None for a share of the documents."""
        return None if self.reading.val_from is None else parse_split(self.reading.val_from)

    def columns(self, number: int) -> tuple[str | None, Mapping[str, str]]:
        """Return the text field and the column mapping of one input."""
        source_recipe = self.source(number)
        reading = source_recipe if source_recipe.text_field is not None or source_recipe.mapping else self.reading
        return reading.text_field, reading.mapping


def as_recipe_inputs(inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Return one path or several as a tuple of strings.

    Raises:
        SettingsError: rows, or a table.
    """
    # Invalid paths are passed on: the recipe reports them with its other problems.
    if isinstance(inputs, (str, bytes, os.PathLike)) or not isinstance(inputs, Iterable):
        inputs = [inputs]
    # Iterating a table or a mapping gives the names of its columns.
    has_columns = isinstance(inputs, Mapping) or hasattr(inputs, "__arrow_c_stream__")
    items = iter(inputs)
    first = [*islice(items, 1)]
    if has_columns or (first and isinstance(first[0], Mapping)):
        kind = type(inputs).__name__
        raise SettingsError([f"inputs: a {kind} of rows is no path; give it to prepare, or write it to a file"])
    return tuple(os.fspath(path) if isinstance(path, os.PathLike) else path for path in chain(first, items))


def is_valid_path(value: object) -> bool:
    """Return whether the system could open a path of this name."""
    try:
        return isinstance(value, str) and bool(value) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def flatten_settings(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a plain recipe, by their names in ``prepare``."""
    own: dict[str, Any] = {name: value for name, value in plain.items() if name not in ("reading", "chat")}
    return own | (plain.get("reading") or {}) | (plain.get("chat") or {})


def count_allowed_bad(max_bad: int | str, records: int) -> int:
    """Return the number of records that may be bad."""
    share = _parse_bad_fraction(max_bad)
    if share is None:
        return int(max_bad)
    return max(10, int(share * records)) if share else 0


def _parse_bad_fraction(max_bad: int | str) -> Fraction | None:
    """Parse ``max_bad`` as a share; None if it is a number of records."""
    if isinstance(max_bad, str) and max_bad.endswith("%"):
        return Fraction(max_bad[:-1]) / 100
    return None


def _check_recipe(recipe: Recipe) -> list[str]:
    problems = find_problems(recipe)
    if not recipe.inputs:
        problems.append("inputs: there are none; name at least one file, folder or glob")
    problems += [
        f"inputs: {quote_value(path)} is no path; name files, folders or globs"
        for path in recipe.inputs
        if not is_valid_path(path)
    ]
    dedup: object = recipe.dedup
    if isinstance(dedup, DedupRecipe):
        problems += dedup.problems()
    else:
        problems.append(f"dedup: {quote_value(dedup)} is no DedupRecipe; give DedupRecipe(mode='none')")
    problems += [
        f"sources[{number}].{problem}" for number, source in enumerate(recipe.sources) for problem in source.problems()
    ]
    return problems + recipe.reading.problems()


def _check_combinations(recipe: Recipe) -> list[str]:
    problems = []
    if len(recipe.sources) not in (0, len(recipe.inputs)):
        counts = f"{len(recipe.sources)} for {len(recipe.inputs)} inputs"
        problems.append(f"sources: there are {counts}; give the settings of each, or none")
    split = recipe.reading.input_split
    has_rows = split is not None and parse_split(split).rows is not None
    if has_rows and any(source.max_samples or source.num_samples for source in recipe.sources):
        problems.append(
            "input_split: rows of a split and a number of records cannot be combined; leave one of them out"
        )
    if recipe.reading.val_from is not None and any(source.subset for source in recipe.sources):
        problems.append("val_from: inputs have a subset of their own; leave val_from out")
    together = recipe.val_fraction + recipe.test_fraction
    if together >= 1:
        problems.append(
            f"val_fraction: val and test together take {together:g} of the tokens, which leaves nothing for train"
        )
    return problems


# Names that other libraries give to these settings.
_OTHER_NAMES = {
    **dict.fromkeys(("num_proc", "num_workers", "n_workers"), "workers"),
    **dict.fromkeys(("text_column", "text_key", "json_keys", "content_key"), "text_field"),
    **dict.fromkeys(("tokenizer_name", "tokenizer_name_or_path", "tokenizer_path"), "tokenizer"),
    "split": "input_split",
    "chat_template": "template",
    "max_length": "max_tokens",
}


# Settings of the order and of batches, which a store does not decide.
_LOADER_NAMES = {field.name for field in fields(PlanSpec)} | {"batch_size"}


def check_option_names(function: str, options: Mapping[str, object], declared: type) -> None:
    """Raise ``TypeError`` for an undeclared keyword argument; name what is meant.

    Args:
        function: name of the called function.
        options: the given keyword arguments.
        declared: the ``TypedDict`` that declares them, from ``keywords.py``.
    """
    names = declared.__annotations__
    for name in options:
        if name not in names:
            other = _OTHER_NAMES.get(name, "")
            meant = f"; give {other}" if other in names else suggest(name, names)
            if not meant and name in _LOADER_NAMES:
                meant = "; give it to the Loader"
            raise TypeError(f"{function}() has no argument {name!r}{meant}")
