"""Settings of training: shipped configurations, validation, batch sizes."""

import math
import os

import pytest

from batchloom import SettingsError
from batchloom.core.settings import to_plain
from batchloom.train import (
    list_model_names,
    load_named_config,
    make_settings,
    read_config,
)
from train.runs import BASE_SETTINGS


def test_shipped_configurations_load():
    assert list_model_names() == ["150M_1024", "250M_1024", "tiny"]
    for name in list_model_names():
        settings = make_settings(load_named_config(name), {})
        assert make_settings(to_plain(settings), {}) == settings


def test_every_problem_is_reported_with_its_path():
    plain = {"model": {"layers": 2, "head": 2, "width": 32}, "step": 5, "seq_len": "long"}
    with pytest.raises(SettingsError) as caught:
        make_settings(plain, {}, "c.json")
    text = str(caught.value)
    assert "c.json.model.head: unknown setting; did you mean 'heads'?" in text
    assert "c.json.model.heads: missing" in text
    assert "c.json.step: unknown setting; did you mean 'steps'?" in text
    assert "c.json.seq_len: 'long' is not int" in text


def test_impossible_values_are_refused():
    plain = {"model": {"layers": 0, "heads": 3, "width": 32}, "optim": {"lr": -1.0, "beta2": 1.0}}
    with pytest.raises(SettingsError) as caught:
        make_settings(plain, {})
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "model.layers",
        "model.width",
        "optim.lr",
        "optim.beta2",
    ]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -1.0])
def test_numbers_that_are_not_finite_are_refused(value):
    names = ["lr", "clip", "beta1", "beta2", "final_lr_share", "weight_decay"]
    plain = {**BASE_SETTINGS, "optim": {**dict.fromkeys(names, value), "lr": 1.0}}
    plain["model"] = {**BASE_SETTINGS["model"], "rotary_base": value}
    with pytest.raises(SettingsError) as caught:
        make_settings(plain, {"optim": {"lr": value}})
    problem_paths = {problem.split(":")[0] for problem in caught.value.problems}
    assert problem_paths == {f"optim.{name}" for name in names} | {"model.rotary_base"}


@pytest.mark.parametrize(
    ("name", "maximum"),
    [
        ("steps", 2**48),
        ("seq_len", 2**24),
        ("global_batch_size", 2**24),
        ("batch_size", 2**24),
        ("seed", 2**128 - 1),
        ("eval_interval", 2**48),
        ("eval_batches", 2**48),
        ("save_interval", 2**48),
    ],
)
def test_absurd_sizes_are_refused_by_their_bound(name, maximum):
    assert getattr(make_settings(BASE_SETTINGS, {name: maximum}), name) == maximum
    with pytest.raises(SettingsError, match=f"{name}: .* is not a whole number from .* to {maximum:,}"):
        make_settings(BASE_SETTINGS, {name: maximum + 1})
    with pytest.raises(SettingsError, match=f"{name}: a number of 13,288 bits is not a whole number"):
        make_settings(BASE_SETTINGS, {name: 10**4000})


def test_absurd_shapes_are_refused_by_their_bound():
    shape = dict.fromkeys(["layers", "heads", "width", "hidden", "vocab_size"], 10**4000)
    with pytest.raises(SettingsError) as caught:
        make_settings({"model": shape, "optim": {"lr": 10**4000}}, {})
    assert caught.value.problems == ("optim.lr: a whole number too large for a float",)
    with pytest.raises(SettingsError) as caught:
        make_settings({"model": shape}, {})
    assert [problem.split(":")[0] for problem in caught.value.problems] == [f"model.{name}" for name in shape]


def test_options_replace_invalid_values_of_the_configuration():
    broken = {**BASE_SETTINGS, "steps": 0, "optim": {"lr": -1.0}}
    settings = make_settings(broken, {"steps": 3, "optim": {"lr": 0.5}})
    assert (settings.steps, settings.optim.lr) == (3, 0.5)


def test_options_override_the_configuration():
    settings = make_settings(BASE_SETTINGS, {"optim": {"lr": 0.5}, "steps": 7})
    assert (settings.optim.lr, settings.steps, settings.seed) == (0.5, 7, 0)
    assert settings.optim.warmup_steps == 5


def test_a_configuration_that_is_no_json_object(tmp_path):
    path = tmp_path / "c.json"
    path.write_text("[1]")
    with pytest.raises(SettingsError, match="list, not a JSON object"):
        read_config(path)
    path.write_text("{")
    with pytest.raises(SettingsError, match="not JSON"):
        read_config(path)
    path.write_bytes(b'{"steps": "\xff"}')
    with pytest.raises(SettingsError, match="c.json: is not JSON"):
        read_config(path)
    path.write_text(f'{{"steps": {"9" * 5000}}}')
    with pytest.raises(SettingsError, match="is not JSON"):
        read_config(path)
    path.write_bytes(b" " * (2 << 20))
    with pytest.raises(SettingsError, match="2,097,152 bytes"):
        read_config(path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_config(tmp_path / "none.json")
    os.mkfifo(tmp_path / "pipe")
    for odd in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(SettingsError, match="cannot be read"):
            read_config(odd)
