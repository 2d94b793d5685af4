"""Errors: standard exception types, and pickling between processes."""

import json
import pickle

import pytest

from batchloom.core.errors import RecordError, SettingsError, make_record_error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            make_record_error("d.jsonl", 5, 17, "not valid JSON: unexpected end"),
            "Invalid JSON on line 5 in d.jsonl, column 17: unexpected end",
        ),
        (make_record_error("d.parquet", None, None, "null", 3), "d.parquet, row 3: null"),
        (make_record_error("d.csv", 7, None, "ragged", 3), "d.csv, line 7: ragged"),
    ],
)
def test_a_record_error_names_its_location(error, sentence):
    assert str(error) == sentence
    unpickled = pickle.loads(pickle.dumps(error))
    assert (type(unpickled), str(unpickled), vars(unpickled)) == (type(error), sentence, vars(error))
    assert isinstance(error, RecordError)
    assert isinstance(error, json.JSONDecodeError) == ("JSON" in sentence)
    assert isinstance(error, ValueError)


def test_the_message_of_many_problems_is_bounded():
    error = SettingsError([f"items[{number}]: wrong" for number in range(20_000)])
    assert len(error.problems) == 20_000
    assert str(error).endswith("; items[19]: wrong; and 19,980 more")
    assert str(SettingsError(["a: wrong", "b: wrong"])) == "a: wrong; b: wrong"
