"""Tokenizers of the Hub, from a local server and from the cache."""

import json

import pytest

from batchloom import InputError
from batchloom.tokens import resolve_tokenizer
from processes import find_free_port, run_python
from tokens.model_hub import serve_models

SCRIPT = """
import json, sys
from batchloom.core.errors import BatchloomError
from batchloom.tokens import resolve_tokenizer
for spec in sys.argv[1:]:
    try:
        t = resolve_tokenizer(spec)
        print(json.dumps([t.name, t.fingerprint, t.end_id, t.bos_id]))
    except BatchloomError as error:
        print(type(error).__name__ + ": " + str(error))
"""


def resolve_in_new_process(home, specs, *, missing=(), **environment):
    """Resolve specs in a new process with ``home`` as the Hub's folder."""
    hub_environment = {
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONWARNINGS": "error::ResourceWarning",
    }
    completed = run_python(SCRIPT, *specs, missing=missing, env=hub_environment | environment)
    assert completed.returncode == 0, completed.stderr
    assert "Retry" not in completed.stderr
    return completed.stdout.splitlines()


@pytest.fixture
def hub_address(trained):
    """Address of a server with org/one (with a config), org/bare and org/empty."""
    tokenizer = json.dumps(trained.state()["tokenizer"]).encode()
    config = json.dumps({"bos_token": "<|endoftext|>", "add_bos_token": True}).encode()
    files = {
        ("org/one", "tokenizer.json"): tokenizer,
        ("org/one", "tokenizer_config.json"): config,
        ("org/bare", "tokenizer.json"): tokenizer,
        ("org/empty", "README.md"): b"",
    }

    with serve_models(files) as address:
        yield address


@pytest.mark.slow
def test_from_the_hub_and_then_from_the_cache(hub_address, tmp_path, trained):
    end = trained.end_id
    online = resolve_in_new_process(tmp_path, ["org/one", "org/bare", "org/empty", "org/none"], HF_ENDPOINT=hub_address)
    assert json.loads(online[0])[2:] == [end, end]
    assert json.loads(online[1]) == ["org/bare", trained.fingerprint, end, None]
    assert online[2].startswith("TokenizerError: org/empty on the Hub has no tokenizer.json")
    assert online[3].startswith("TokenizerError: the Hub has no repository org/none")
    offline = resolve_in_new_process(tmp_path, ["org/one", "org/bare", "org/none"], HF_HUB_OFFLINE="1")
    assert offline[:2] == online[:2]
    assert "tokenizer.json of org/none is not in the local Hub cache and the Hub cannot be" in offline[2]
    assert "give the path of a tokenizer.json, bytes, or train:8192" in offline[2]


def test_an_unreachable_hub_is_asked_once(tmp_path):
    results = resolve_in_new_process(tmp_path, ["org/none"], HF_ENDPOINT=f"http://127.0.0.1:{find_free_port()}")
    assert "not in the local Hub cache and the Hub cannot be reached" in results[0]


@pytest.mark.parametrize("address", ["", "host", "ftp://host", "http://[host", "http://s3cret@h:99999", "https://"])
def test_an_invalid_address_is_reported_without_its_text(monkeypatch, address):
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(InputError, match="HF_ENDPOINT is not the address of a Hub: unset it, or write") as caught:
        resolve_tokenizer("org/none")
    assert "s3cret" not in str(caught.value)


def test_a_hub_id_needs_its_package_and_a_folder_of_that_name_does_not(tmp_path, monkeypatch, trained):
    (tmp_path / "org" / "one").mkdir(parents=True)
    (tmp_path / "org" / "one" / "tokenizer.json").write_text(json.dumps(trained.state()["tokenizer"]))
    monkeypatch.chdir(tmp_path)
    message, folder = resolve_in_new_process(tmp_path, ["org/name", "org/one"], missing=["huggingface_hub"])
    assert message.startswith("MissingDependencyError: org/name is a Hub id")
    assert "pip install 'batchloom[hf]'" in message
    assert json.loads(folder)[1] == trained.fingerprint
