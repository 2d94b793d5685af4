"""Damaged and changing data, hostile names, many readers and the end of the server."""

import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from html import unescape

import httpx
import pytest

import batchloom
from batchloom.testing import append_documents, write_store
from golden.inputs import make_tokenizer_json
from view.conftest import TOKEN, serving

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'>{{777*7777}}"


@contextlib.contextmanager
def open_client(address):
    with httpx.Client(base_url=address, follow_redirects=True, timeout=60) as client:
        client.get("/static/icon.svg", params={"token": TOKEN})
        yield client


def read_error(response):
    match = re.search(r'<p class="error" role="alert">(.*?)</p>', response.text, re.DOTALL)
    return unescape(match[1]) if match else ""


def cut(path):
    path.write_bytes(path.read_bytes()[:40])


@pytest.mark.parametrize(
    ("damage", "path", "message"),
    [
        (lambda store: cut(store / "train/shard_00000.bin"), "/documents", "shard_00000.bin has 40 bytes"),
        (lambda store: cut(store / "train/shard_00000.docs"), "/document/1", "do not fit its 40 bytes"),
        (lambda store: (store / "train/shard_00000.docs").unlink(), "/document/1", "No such file"),
        (lambda store: (store / "train/shard_00000.idx").unlink(), "/packing?seq_len=64", "No such file"),
        (lambda store: (store / "tokenizer_state.json").write_text("{"), "/documents", "tokenizer_state.json"),
        (lambda store: (store / "dataset_metadata.json").write_text("{}"), "/", "not a manifest"),
        (shutil.rmtree, "/packing?seq_len=64", "There is no file or folder"),
    ],
    ids=["ids", "records", "no records", "no index", "tokenizer", "manifest", "store"],
)
def test_damage_while_the_store_is_served_is_named(tmp_path, capfd, damage, path, message):
    write_store(tmp_path / "store", [[104, 105] * 20, [60, 98, 62], [106] * 50])
    with serving(tmp_path / "store") as address, open_client(address) as client:
        damage(tmp_path / "store")
        response = client.get(path)
        assert response.status_code == 400
        assert message in read_error(response)
        assert "Back to the overview" in response.text
    assert "Traceback" not in capfd.readouterr().err


def test_pages_follow_a_store_that_grows_shrinks_and_is_compacted(tmp_path):
    store = write_store(tmp_path / "store", [[104, 105], [60, 98, 62], [106] * 50])
    with serving(store.path) as address, open_client(address) as client:
        assert "There is no document 3" in read_error(client.get("/document/3"))
        append_documents(store.path, [[107] * 9])
        assert "kkkkkkkkk" in client.get("/document/3").text
        (tmp_path / "named").write_text(batchloom.open_store(store.path)[1].provenance.hash + "\n")
        batchloom.store.remove_documents(store.path, documents_file=tmp_path / "named")
        assert "served as end tokens without loss" in client.get("/document/1").text
        batchloom.store.compact_store(store.path)
        assert "jjjj" in client.get("/document/1").text
        assert client.get("/packing?seq_len=64&batch=1").status_code == 200


@pytest.fixture(scope="module")
def hostile_store(tmp_path_factory):
    """A store with markup in file names, reasons, roles, texts, notes and control tokens."""
    folder = tmp_path_factory.mktemp("hostile")
    name = HOSTILE.replace("/", "")
    rows = [
        {"messages": [{"role": "user", "content": HOSTILE}, {"role": role, "content": f"{number} {HOSTILE}"}]}
        for number, role in enumerate(("assistant", "assistant", HOSTILE))
    ]
    lines = [*map(json.dumps, rows), json.dumps({"messages": HOSTILE}), HOSTILE]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "tokenizer.json").write_text(make_tokenizer_json(("<|endoftext|>", "<|im_start|>", "<|im_end|>")))
    batchloom.prepare(
        folder / f"{name}.jsonl",
        out=folder / f"store {name}",
        tokenizer=str(folder / "tokenizer.json"),
        template="chatml",
        max_bad=5,
        val_fraction=0,
    )
    with (folder / f"store {name}" / "quarantine.jsonl").open("a") as file:
        file.write(json.dumps({"source": HOSTILE, "line": HOSTILE, "reason": HOSTILE}) + "\n5\n")
    return folder / f"store {name}"


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/documents", "/document/0", "/document/0?as=tokens", "/packing?seq_len=256&batch=1"),
        *("/documents?text=" + "%3Cscript%3E", "/documents?file=%3Cimg%20src=x%3E", "/packing?packing=%3Cb%3E"),
    ],
)
def test_markup_in_any_field_is_inert(hostile_store, page, path):
    with serving(hostile_store) as address:
        page.goto(f"{address}/?token={TOKEN}")
        response = page.goto(address + path)
        assert "alert(1)" in response.text() or response.status == 400
        assert page.locator("main script, main b, main img:not(.media img)").count() == 0
        assert page.evaluate("document.body.innerText").count("6042729") == 0
        # The page of an error is an answer of status 400, which Chromium reports.
        page.problems[:] = [problem for problem in page.problems if "status of 400" not in problem]


def test_a_folder_name_that_is_no_text_can_be_shown(tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/st\xffore")
    write_store(folder, [[104, 105]])
    with serving(folder) as address, open_client(address) as client:
        for path in ("/", "/documents", "/packing?seq_len=8"):
            assert client.get(path).status_code == 200


def test_a_document_of_ten_megabytes_is_shown_in_parts(tmp_path):
    write_store(tmp_path / "store", [[97] * 10_000_000 + [122], [98]])
    with serving(tmp_path / "store") as address, open_client(address) as client:
        for path in ("/documents", "/document/0", "/document/0?as=tokens", "/packing?seq_len=4096", "/document/0/json"):
            begin = time.process_time()
            response = client.get(path)
            assert response.status_code == 200
            assert len(response.text) < 1_000_000
            assert time.process_time() - begin < 5
        assert "z" in client.get("/document/0?at=9999999").text.partition("<main")[2]


def test_two_browsers_and_twenty_requests_at_once(tmp_path):
    documents = [[97 + number % 26] * (number % 50 + 1) for number in range(500)]
    write_store(tmp_path / "store", documents, documents_per_shard=50)
    paths = ["/", "/documents", "/documents?text=zz", "/packing?seq_len=128&batch=4", "/packing/strategies?seq_len=64"]
    paths += [f"/document/{number}" for number in range(0, 500, 33)]
    with serving(tmp_path / "store") as address, open_client(address) as one, open_client(address) as other:
        expected = {path: one.get(path).text for path in paths}
        append_documents(tmp_path / "store", [[98] * 7])
        append_documents(tmp_path / "store", [[98] * 8])
        expected = {path: one.get(path).text for path in paths}
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            answers = pool.map(
                lambda number: (number, (one, other)[number % 2].get(paths[number % len(paths)])), range(100)
            )
            for number, response in answers:
                assert response.status_code == 200
                assert response.text == expected[paths[number % len(paths)]]


def start_server(*arguments):
    command = [sys.executable, "-m", "batchloom", "view", *map(str, arguments), "--no-browser"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 0)])
def test_a_signal_ends_the_server_at_once_and_quietly(tmp_path, number, code):
    write_store(tmp_path / "store", [[104, 105]])
    process = start_server(tmp_path / "store")
    address = process.stdout.readline().strip()
    with httpx.Client(follow_redirects=True, timeout=60) as client:
        # The connection stays open, as that of a browser does.
        assert client.get(address).status_code == 200
        begin = time.monotonic()
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (code, "")
    assert time.monotonic() - begin < 10


def test_a_port_in_use_is_named(tmp_path):
    write_store(tmp_path / "store", [[104, 105]])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start_server(tmp_path / "store", "--port", port)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert (
        errors
        == f"batchloom: Port {port} cannot be used: address already in use. Give another --port, or leave it out.\n"
    )
