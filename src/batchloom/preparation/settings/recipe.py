"""The recipe: every setting of ``prepare`` as one value."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any, Literal

import xxhash

from batchloom.chat import BUILT_IN_TEMPLATES
from batchloom.chat.templates import TrainOn
from batchloom.core.errors import SettingsError
from batchloom.core.files import read_regular_file
from batchloom.core.fingerprint import fingerprint
from batchloom.core.settings import is_bool, is_text, quote_value, raise_problems, suggest, to_plain
from batchloom.preparation.settings.chat_rules import ChatRules
from batchloom.preparation.settings.dedup_recipe import DedupRecipe
from batchloom.preparation.settings.evaluation_sets import (
    clean_steps_to_plain,
    fingerprint_step_files,
)
from batchloom.preparation.settings.fim_recipe import fim_to_plain
from batchloom.preparation.settings.media_recipe import media_to_plain
from batchloom.preparation.settings.overlong_policy import OVERLONG_POLICIES, OverlongPolicy
from batchloom.preparation.settings.read_recipe import (
    ReadRecipe,
    SourceRecipe,
    describe_non_text,
    sources_to_plain,
)
from batchloom.preparation.settings.recipe_values import clean_steps_to_settings, dedup_to_plain
from batchloom.sources import make_input_labels

Dtype = Literal["auto", "uint16", "int32"]

_DTYPES = ("auto", "uint16", "int32")
# Bounds what a shard's index and origins take in memory, whatever the documents' lengths.
SHARD_DOCUMENTS = 1 << 20
# Far above any shard and any input; numbers of tokens are kept in 64 bits.
MAX_SHARD_TOKENS = 10**12
_MAX_BAD_COUNT = 10**18
_BAD_BUDGET_PATTERN = r"[0-9]{1,30}|[0-9]{1,30}(\.[0-9]{1,30})?%"
# Settings that decide no byte of the shards.
_NON_IDENTITY_SETTINGS = ("inputs", "max_bad", "follow_links")
# Settings that hold settings.
_NESTED_SETTINGS = ("reading", "chat")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRecipe:
    """What becomes of conversations.

    Attributes:
        template: ``chatml``, ``llama3``, ``alpaca``, ``plain``, the name of one of the tokenizer's
            own or the path of a file; None for the tokenizer's own, else ``plain``.
        train_on: the turns that are trained: ``assistant``, ``all``, ``last`` or ``completion``;
            None for the completion of prompt-completion records, the assistant's turns of others.
        max_tokens: tokens a conversation may have; None for any number.
        overlong: what becomes of one that has more: ``drop``, ``truncate-turns``, ``split`` (documents
            of at most ``max_tokens``, one after the other) or ``error``.
        prove: whether trained tokens are decoded and compared with the text, too.
    """

    template: str | None = None
    train_on: TrainOn | None = None
    max_tokens: int | None = None
    overlong: OverlongPolicy = "drop"
    prove: bool = False

    def __post_init__(self) -> None:
        problems: list[str] = []
        try:
            self.rules(completion=False)
        except SettingsError as error:
            problems += error.problems
        if self.overlong in OVERLONG_POLICIES[1:] and self.max_tokens is None:
            problems.append(
                f"chat.overlong: {quote_value(self.overlong)} is for conversations of more than max_tokens, which "
                f"is not "
                "given; add --max-tokens N, or leave --overlong out"
            )
        if self.template is not None and not is_text(self.template):
            problems.append(f"chat.template: {quote_value(self.template)} is no name; give one or a path")
        if not is_bool(self.prove):
            problems.append(f"chat.prove: {quote_value(self.prove)} is neither True nor False")
        raise_problems(problems)

    def rules(self, *, completion: bool) -> ChatRules:
        """The rules for one source, whose records have a completion or not."""
        train_on = self.train_on or ("completion" if completion else "assistant")
        return ChatRules(train_on, self.max_tokens, self.overlong, self.prove)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How inputs become a store; the same recipe over the same inputs gives the same bytes.

    Attributes:
        inputs: files, folders and globs, in the order they are read.
        sources: what is said of each input alone; empty where nothing is said of any.
        tokenizer: ``bytes``, ``gpt2``, ``train:N``, ``tiktoken:NAME``, a path or a Hub id.
        end_token: the end-of-document token, where the tokenizer does not say.
        reading: how records and text files are read.
        tokens_per_shard: a shard has at most so many tokens, except for a single longer document.
        dtype: of a token on disk; ``auto``: uint16 below a vocabulary of 65,500, else int32.
        follow_links: follow symbolic links that lead out of an input folder; else they are skipped.
        val_fraction: share that goes into the ``val`` subset; documents are chosen by hash.
        test_fraction: share that goes into the ``test`` subset; documents are chosen by hash.
        balance_subsets: move single documents where a subset misses its share of the tokens by more than
            20 % of it; else hashes alone choose.
        dedup: which duplicates are left out.
        max_bad: records that may be bad: a number, or a share (``"0.1%"``) that allows at
            least 10; beyond it the job fails.
        chat: what becomes of conversations.
    """

    inputs: tuple[str, ...]
    sources: tuple[SourceRecipe, ...] = ()
    tokenizer: str = "gpt2"
    end_token: str | None = None
    reading: ReadRecipe = field(default_factory=ReadRecipe)
    tokens_per_shard: int = 100_000_000
    dtype: Dtype = "auto"
    follow_links: bool = False
    val_fraction: float = 0.01
    test_fraction: float = 0.0
    balance_subsets: bool = True
    dedup: DedupRecipe = field(default_factory=DedupRecipe)
    max_bad: int | str = "0.1%"
    chat: ChatRecipe = field(default_factory=ChatRecipe)

    def __post_init__(self) -> None:
        problems = _check_recipe(self) + self.reading.problems() + _check_fractions(self)
        raise_problems(problems + _check_sources(self))
        # 0 and 0.0 are one recipe and must have one fingerprint.
        object.__setattr__(self, "val_fraction", float(self.val_fraction))
        object.__setattr__(self, "test_fraction", float(self.test_fraction))

    def source(self, number: int) -> SourceRecipe:
        """What is said of an input alone."""
        return self.sources[number] if self.sources else SourceRecipe()

    def columns(self, number: int) -> tuple[str | None, Mapping[str, str]]:
        """The text field and the mapping that an input is read by."""
        source_recipe = self.source(number)
        reading = source_recipe if source_recipe.text_field is not None or source_recipe.mapping else self.reading
        return reading.text_field, reading.mapping


def as_recipe_inputs(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> tuple[str, ...]:
    """Inputs as the recipe holds them, from one path or several."""
    # What is no path is left for the recipe to refuse, with all else that is wrong.
    if isinstance(inputs, (str, bytes, os.PathLike)) or not isinstance(inputs, Iterable):
        inputs = [inputs]
    return tuple(os.fspath(path) if isinstance(path, os.PathLike) else path for path in inputs)


def is_valid_path(value: object) -> bool:
    """Whether the system could open something by this name."""
    try:
        return isinstance(value, str) and bool(value) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def recipe_to_plain(recipe: Recipe) -> dict[str, Any]:
    """The recipe as the manifest holds it: plain values, no absolute paths."""
    plain = to_plain(replace(recipe, sources=()))
    plain["inputs"] = make_input_labels(recipe.inputs)
    if not recipe.follow_links:
        del plain["follow_links"]
    if not is_balanced(recipe):
        # As in manifests of versions that had no such rule.
        del plain["balance_subsets"]
    plain["sources"] = sources_to_plain(recipe.sources)
    plain["reading"]["clean"] = clean_steps_to_settings(clean_steps_to_plain(recipe.reading.clean))
    if files_fingerprint := fingerprint_step_files(recipe.reading.clean):
        plain["reading"]["clean_files"] = files_fingerprint
    # Settings that came later are left out where they say nothing: older recipes stay the same.
    if not recipe.reading.ignore:
        plain["reading"].pop("ignore")
    plain["reading"].pop("fim")
    if recipe.reading.fim is not None:
        plain["reading"]["fim"] = fim_to_plain(recipe.reading.fim)
    plain["reading"].pop("media")
    if recipe.reading.media is not None:
        plain["reading"]["media"] = media_to_plain(recipe.reading.media)
    plain["dedup"] = dedup_to_plain(recipe.dedup)
    if PurePath(recipe.tokenizer).is_absolute():
        plain["tokenizer"] = Path(recipe.tokenizer).name
    plain["chat"] |= _template_to_plain(recipe.chat.template)
    return plain


def is_balanced(recipe: Recipe) -> bool:
    """Return whether documents may move between the subsets of a recipe."""
    return recipe.balance_subsets and bool(recipe.val_fraction or recipe.test_fraction)


def _template_to_plain(template: str | None) -> dict[str, Any]:
    """A template that is a file, by its name and content; another by its name alone."""
    if template is None or template in BUILT_IN_TEMPLATES:
        return {}
    if not Path(template).is_file():
        return {"template": Path(template).name} if PurePath(template).is_absolute() else {}
    content = read_regular_file(template)
    return {"template": Path(template).name, "template_hash": xxhash.xxh3_128_hexdigest(content)}


def compute_recipe_fingerprint(recipe: Recipe) -> str:
    """Names what a recipe does to a document, wherever its inputs lie."""
    plain = recipe_to_plain(recipe) | {"sources": sources_to_plain(recipe.sources, include_labels=False)}
    # Documents move between subsets after units are made: what becomes of each document is the same.
    ignored_settings = {*_NON_IDENTITY_SETTINGS, "balance_subsets"}
    return fingerprint({name: value for name, value in plain.items() if name not in ignored_settings})


def list_recipe_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The settings that decide bytes and differ, each as ``name: old -> new``."""
    then, now = flatten_settings(old), flatten_settings(new)
    return [
        f"{name}: {_describe_setting_change(name, then.get(name), now.get(name))}"
        for name in {**now, **then}
        if name not in _NON_IDENTITY_SETTINGS and then.get(name) != now.get(name)
    ]


def _describe_setting_change(name: str, old: Any, new: Any) -> str:
    """How one setting differs; of steps of cleaning their names, or the first that has other settings."""
    if name != "clean":
        return f"{quote_value(old)} -> {quote_value(new)}"
    steps = [
        [(entry, {}) if isinstance(entry, str) else next(iter(entry.items())) for entry in steps or ()]
        for steps in (old, new)
    ]
    names = [",".join(step for step, _ in step_list) or "none" for step_list in steps]
    if names[0] != names[1] or steps[0] == steps[1]:
        # Where an import says nothing of cleaning there is none either.
        return f"{names[0]} -> {names[1]}"
    pairs = zip(*steps, strict=True)
    (step, then), (_, now) = next(pair for pair in pairs if pair[0] != pair[1])
    setting = next(key for key in {**then, **now} if then.get(key) != now.get(key))
    return f"{step}: {setting}: {quote_value(then.get(setting))} -> {quote_value(now.get(setting))}"


def flatten_settings(plain: dict[str, Any]) -> dict[str, Any]:
    """The settings of a plain recipe by the names that ``prepare`` takes them under."""
    flat = {field.name: plain.get(field.name) for field in fields(Recipe)}
    groups = [flat.pop(name) or {} for name in _NESTED_SETTINGS]
    return {name: value for group in (flat, *groups) for name, value in group.items()}


def count_allowed_bad(max_bad: int | str, records: int) -> int:
    """How many of so many records may be bad."""
    share = _parse_bad_fraction(max_bad)
    if share is None:
        return int(max_bad)
    return max(10, int(share * records)) if share else 0


def _parse_bad_fraction(max_bad: int | str) -> Fraction | None:
    """The share that ``max_bad`` stands for; None where it is a number of records."""
    if isinstance(max_bad, str) and max_bad.endswith("%"):
        return Fraction(max_bad[:-1]) / 100
    return None


def _check_recipe(recipe: Recipe) -> list[str]:
    problems = _check_words(recipe)
    if not recipe.inputs:
        problems.append("inputs: there are none; name at least one file, folder or glob")
    problems += [
        f"inputs: {quote_value(path)} is no path; name files, folders or globs"
        for path in recipe.inputs
        if not is_valid_path(path)
    ]
    if recipe.dtype not in _DTYPES:
        problems.append(
            f"dtype: {quote_value(recipe.dtype)} is none of {', '.join(_DTYPES)}{_suggest_value(recipe.dtype, _DTYPES)}"
        )
    dedup: object = recipe.dedup
    if isinstance(dedup, DedupRecipe):
        problems += dedup.problems()
    else:
        problems.append(f"dedup: {quote_value(dedup)} is no DedupRecipe; give DedupRecipe(mode='none')")
    tokens = recipe.tokens_per_shard
    if not _is_count(tokens) or not 1 <= tokens <= MAX_SHARD_TOKENS:
        problems.append(f"tokens_per_shard: {quote_value(tokens)} is not a whole number from 1 to {MAX_SHARD_TOKENS:,}")
    problems += [
        f"{name}: {quote_value(value)} is neither True nor False"
        for name, value in (
            ("balance_subsets", recipe.balance_subsets),
            ("follow_links", recipe.follow_links),
        )
        if not is_bool(value)
    ]
    if not _is_bad_budget(recipe.max_bad):
        problems.append(
            f"max_bad: {quote_value(recipe.max_bad)} is neither a number of records up to {_MAX_BAD_COUNT:,} nor a "
            f"share up "
            "to 100% such as '0.1%'"
        )
    return problems


def _check_sources(recipe: Recipe) -> list[str]:
    if len(recipe.sources) not in (0, len(recipe.inputs)):
        counts = f"{len(recipe.sources)} for {len(recipe.inputs)} inputs"
        return [f"sources: there are {counts}; say something of each, or of none"]
    return [
        f"sources[{number}].{problem}" for number, source in enumerate(recipe.sources) for problem in source.problems()
    ]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_bad_budget(value: object) -> bool:
    """Whether this is a number of bad records, or a share of all."""
    if _is_count(value):
        return 0 <= value <= _MAX_BAD_COUNT  # type: ignore[operator]  # it is a number
    if not isinstance(value, str) or not re.fullmatch(_BAD_BUDGET_PATTERN, value):
        return False
    share = _parse_bad_fraction(value)
    return share <= 1 if share is not None else int(value) <= _MAX_BAD_COUNT


def _suggest_value(value: object, choices: Sequence[str]) -> str:
    return suggest(value, choices) if isinstance(value, str) else ""


def _check_words(recipe: Recipe) -> list[str]:
    problems = [] if is_text(recipe.tokenizer) else [describe_non_text("tokenizer", recipe.tokenizer)]
    if recipe.end_token is not None and not is_text(recipe.end_token):
        problems.append(describe_non_text("end_token", recipe.end_token))
    if isinstance(recipe.tokenizer, str) and "\0" in recipe.tokenizer:
        problems.append(f"tokenizer: {quote_value(recipe.tokenizer)} holds a NUL, which no name can; leave it out")
    return problems


def _check_fractions(recipe: Recipe) -> list[str]:
    problems = []
    for name in ("val_fraction", "test_fraction"):
        value = getattr(recipe, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
            problems.append(f"{name}: {quote_value(value)} is not in [0, 1)")
    if not problems and recipe.val_fraction + recipe.test_fraction >= 1:
        together = recipe.val_fraction + recipe.test_fraction
        problems.append(
            f"val_fraction: val and test together take {together:g} of the documents, which leaves nothing for train"
        )
    return problems
