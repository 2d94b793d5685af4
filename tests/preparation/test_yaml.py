"""YAML as plain values, also from hostile files."""

import time

import pytest
import yaml

from batchloom import InputError
from batchloom.core.errors import InputMissingError, RecordError
from batchloom.core.yaml_reader import parse_yaml, read_yaml


def parse(text):
    return parse_yaml(text if isinstance(text, bytes) else text.encode(), "f.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nb: [x, 2.5, true, null, ~, 'yes', -3, 0x10]\nc:\n  - {d: e}\n  - []\n",
        "- &a {x: 1, y: [2]}\n- *a\n- <<: *a\n  x: 3\n",
        "a: &k b\n*k : c\n",
        "a: &b 5\nc: *b\nd: |\n  two\n  lines\ne: >-\n  one\n  line\n",
        "a: yes\nb: off\nc: .inf\nd: 1_000\ne: ''\nf: \"q\\n\"\ng: !!str 5\n",
        "<<: [{a: 1}, {a: 2, b: 3}]\n",
        "---\na: b\n...\n",
        "[]",
        "just text",
    ],
)
def test_what_people_write_is_what_pyyaml_reads(text):
    assert parse(text) == yaml.safe_load(text)


def test_differences_from_pyyaml():
    assert parse("a: 1e-3\nb: 2024-01-02\non: x\n5: y\n") == {
        "a": 0.001,
        "b": "2024-01-02",
        "on": "x",
        "5": "y",
    }
    assert parse("\ufeffa: é".encode()) == parse("a: é".encode("utf-16")) == {"a": "é"}


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("a: 1\nb: [2\nc: 3", 3, 2, "while parsing a flow sequence: expected ',' or '\\]', but got ':'"),
        ("a:\n\t- b", 2, 1, "cannot start any token"),
        ("a: b: c", 1, 5, "mapping values are not allowed"),
        ("a: 1\nb: 2\na: 3", 3, 1, "the key 'a' is given twice"),
        ("x:\n  - {a: 1, a: 2}", 2, 12, "the key 'a' is given twice"),
        ("a: !!python/object/apply:os.system [ls]", 1, 4, "the tag"),
        ("a: !include other.yaml", 1, 4, "the tag '!include' is not supported"),
        ("? [a, b]\n: c", 1, 3, "a key is a list or mapping"),
        ("a: &x [*x]", 1, 4, "an alias refers to a list or mapping that contains it"),
        ("a: *x", 1, 4, "found undefined alias 'x'"),
        ("<<: 5", 1, 5, "expected a mapping or list of mappings for merging"),
        ("a: 1\n---\nb: 2", 2, 1, "expected a single document"),
        ("a: !!int x", 1, 4, "cannot be read as int"),
        ("a: " + "9" * 5000, 1, 4, "cannot be read as int"),
        ("[" * 100_000, 1, 65, "nested more than 64 deep"),
        ("{a: " * 100_000, 1, 257, "nested more than 64 deep"),
        ("- " * 100_000, None, None, "nested more than 64 deep"),
        ("%YAML 3.0\n---\na", 1, 1, "incompatible"),
        ("a\0b", None, None, "control character"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", None, None, "is not text"),
    ],
)
def test_invalid_yaml_is_reported_with_its_position(text, line, column, message):
    start = time.process_time()
    with pytest.raises(RecordError, match=message) as error:
        parse(text)
    assert (error.value.line, error.value.column) == (line, column)
    assert str(error.value).startswith("f.yaml")
    assert len(str(error.value)) < 400
    assert time.process_time() - start < 10


@pytest.mark.parametrize("inner", ["[*a{0}, *a{0}, *a{0}, *a{0}]", "{{x: *a{0}, y: *a{0}, z: *a{0}}}"])
def test_a_billion_laughs_end_soon(inner):
    lines = ["- &a0 [lol, lol, lol, lol]"]
    lines += [f"- &a{n + 1} {inner.format(n)}" for n in range(60)]
    start = time.process_time()
    with pytest.raises(RecordError, match="values, aliases followed"):
        parse("\n".join(lines))
    assert time.process_time() - start < 10


def test_aliases_do_not_nest_deeper_than_lists_may():
    lines = ["- &a0 []"] + [f"- &a{n + 1} [*a{n}]" for n in range(2000)]
    with pytest.raises(RecordError, match="nested more than 64 deep"):
        parse("\n".join(lines))


@pytest.mark.parametrize("text", ["", "# nothing\n", "\n\n", "\ufeff"])
def test_nothing_in_it(text):
    with pytest.raises(InputMissingError, match=r"f\.yaml is empty"):
        parse(text)


def test_files_that_are_none(tmp_path):
    (tmp_path / "data.yaml").write_text("a: 1")
    with pytest.raises(InputMissingError, match=r"There is no file or folder .*; did you mean '.*/data.yaml'"):
        read_yaml(tmp_path / "dat.yaml")
    with pytest.raises(InputError, match="it is a folder"):
        read_yaml(tmp_path)
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate((32 << 20) + 1)
    with pytest.raises(InputError, match="more than 32 MiB"):
        read_yaml(tmp_path / "large.yaml")
