"""Settings: what ships loads, what is wrong is told at once, sizes divide."""

import dataclasses

import pytest

from batchloom import SettingsError
from batchloom.core.spec import to_plain
from batchloom.train.model import GPT, padded_vocabulary, parameter_count
from batchloom.train.settings import (
    accumulation,
    model_names,
    named_config,
    read_config,
    settings_from,
)
from train.runs import PLAIN


def test_shipped_configurations_load():
    assert model_names() == ["150M_1024", "250M_1024", "tiny"]
    for name in model_names():
        settings = settings_from(named_config(name), {})
        assert settings_from(to_plain(settings), {}) == settings
        assert accumulation(settings, 1) * (settings.batch_size or settings.global_batch_size)


@pytest.mark.parametrize(("name", "millions"), [("150M_1024", 150), ("250M_1024", 250)])
def test_names_tell_the_size(name, millions):
    settings = settings_from(named_config(name), {})
    shape = settings.model
    # Built with one layer and a small vocabulary; the rest is arithmetic.
    small = GPT(dataclasses.replace(shape, layers=1), 64)
    layer = parameter_count(small.layers[0])
    whole = shape.layers * layer + padded_vocabulary(50_257) * shape.width
    assert whole == pytest.approx(millions * 1e6, rel=0.05)
    assert settings.seq_len == 1024


def test_every_problem_is_told_with_its_path():
    plain = {"model": {"layers": 2, "head": 2, "width": 32}, "step": 5, "seq_len": "long"}
    with pytest.raises(SettingsError) as caught:
        settings_from(plain, {}, "c.json")
    text = str(caught.value)
    assert "c.json.model.head: unknown setting; did you mean 'heads'?" in text
    assert "c.json.model.heads: missing" in text
    assert "c.json.step: unknown setting; did you mean 'steps'?" in text
    assert "c.json.seq_len: 'long' is not int" in text


def test_impossible_values_are_told_at_once():
    plain = {"model": {"layers": 0, "heads": 3, "width": 32}, "optim": {"lr": -1.0, "beta2": 1.0}}
    with pytest.raises(SettingsError) as caught:
        settings_from(plain, {})
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "model.layers",
        "model.width",
        "optim.lr",
        "optim.beta2",
    ]


def test_what_is_asked_for_goes_over_the_configuration():
    settings = settings_from(PLAIN, {"lr": 0.5, "steps": 7, "seed": None})
    assert (settings.optim.lr, settings.steps, settings.seed) == (0.5, 7, 0)
    assert settings.optim.warmup_steps == 5


def test_passes_make_the_step():
    settings = settings_from(PLAIN, {"global_batch_size": 24, "batch_size": 3})
    assert [accumulation(settings, n) for n in (1, 2, 4, 8)] == [8, 4, 2, 1]
    whole = settings_from(PLAIN, {"global_batch_size": 24})
    assert accumulation(whole, 3) == 1


def test_sizes_that_do_not_divide_name_those_that_do():
    settings = settings_from(PLAIN, {"global_batch_size": 24, "batch_size": 5})
    with pytest.raises(SettingsError, match="--batch-size 1, 2, 3, 4, 6, 12 can"):
        accumulation(settings, 2)
    with pytest.raises(SettingsError, match="7 ranks; 21 or 28 can"):
        accumulation(settings, 7)


def test_a_configuration_that_is_no_json_object(tmp_path):
    path = tmp_path / "c.json"
    path.write_text("[1]")
    with pytest.raises(SettingsError, match="list, not a JSON object"):
        read_config(path)
    path.write_text("{")
    with pytest.raises(SettingsError, match="not JSON"):
        read_config(path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_config(tmp_path / "none.json")
