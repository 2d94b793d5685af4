"""A processor of the Hub: a server on loopback stands for it; the cache first; offline is one sentence."""

import os
import subprocess
import sys

import pytest

import batchloom
from media.made import write_images
from media.processors import MADE, save
from processes import run_module
from tokens.model_hub import serving_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(MADE["llava"](), tmp_path_factory.mktemp("processors") / "llava")


@pytest.fixture(scope="module")
def hub(folder):
    """A server with org/llava, and org/text, which is of no processor."""
    files = {("org/llava", path.name): path.read_bytes() for path in folder.iterdir()}
    files[("org/text", "tokenizer.json")] = (folder / "tokenizer.json").read_bytes()
    with serving_models(files) as address:
        yield address


def prepared(named, source, out, home, **environment):
    """Run ``prepare`` in a process of its own with ``home`` as the Hub's folder."""
    known = {
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_ETAG_TIMEOUT": "2",
    }
    given = ["--processor", named, "--tokenizer", named, "--val-fraction", "0", "--out", str(out)]
    return run_module("media.prepare_from_hub", "prepare", source, *given, env=known | environment)


def named_in(store):
    return batchloom.open_store(store).manifest.recipe["reading"]["media"]["processor"]


def test_from_the_hub_and_then_from_the_cache(hub, folder, tmp_path):
    source = write_images(tmp_path / "in", 3)
    online = prepared("org/llava", source, tmp_path / "online", tmp_path / "hub", HF_ENDPOINT=hub)
    assert online.returncode == 0, online.stderr
    offline = prepared("org/llava", source, tmp_path / "offline", tmp_path / "hub", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    local = prepared(str(folder), source, tmp_path / "local", tmp_path / "none", HF_HUB_OFFLINE="1")
    assert local.returncode == 0, local.stderr
    stores = [batchloom.open_store(tmp_path / name) for name in ("online", "offline", "local")]
    assert len({store.manifest.processor.fingerprint for store in stores}) == 1
    assert len({store.fingerprint for store in stores}) == 1
    named = [named_in(tmp_path / name) for name in ("online", "offline", "local")]
    assert named == ["org/llava", "org/llava", folder.name]
    again = prepared("org/llava", source, tmp_path / "online", tmp_path / "hub", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("org/text", "org/text on the Hub has no processor_config.json or preprocessor_config"),
        ("org/none", "the Hub has no repository org/none"),
    ],
)
def test_what_is_not_there_is_told(hub, tmp_path, named, said):
    source = write_images(tmp_path / "in", 1)
    done = prepared(named, source, tmp_path / "out", tmp_path / "hub", HF_ENDPOINT=hub)
    assert done.returncode == 1, done.stderr
    assert said in " ".join(done.stderr.split())
    assert "give the folder that a processor's save_pretrained wrote" in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_without_network_and_cache(tmp_path):
    source = write_images(tmp_path / "in", 1)
    done = prepared("org/llava", source, tmp_path / "out", tmp_path / "hub", HF_HUB_OFFLINE="1")
    assert done.returncode == 1, done.stderr
    assert "the Hub cannot be reached (HF_HUB_OFFLINE is set)" in " ".join(done.stderr.split())


def test_a_folder_of_that_name_is_no_hub_id(folder, tmp_path, monkeypatch):
    source = write_images(tmp_path / "in", 1)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "llava").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    closed = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    done = prepared("org/llava", source, "out", tmp_path / "hub", **closed)
    assert done.returncode == 0, done.stderr
    assert named_in(tmp_path / "out") == "llava"


@pytest.mark.slow
def test_a_fresh_process_takes_the_settings_of_the_hub(hub, tmp_path):
    source = write_images(tmp_path / "in", 1)
    known = {"HF_HOME": str(tmp_path / "hub"), "HF_ENDPOINT": hub, "HF_HUB_DISABLE_XET": "1"}
    given = ["--processor", "org/llava", "--tokenizer", "org/llava", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "batchloom", "prepare", str(source), *given],
        capture_output=True,
        text=True,
        env=os.environ | known,
    )
    assert done.returncode == 0, done.stderr
    assert named_in(tmp_path / "out") == "org/llava"
