"""Damaged and changing data, hostile names, many readers and the end of the server."""

import concurrent.futures
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from html import unescape

import httpx
import pytest

import batchloom
from batchloom.cli import run_command_line
from batchloom.testing import append_documents, write_store
from batchloom.view import ValueCache, ViewSpec, make_pages
from golden.inputs import make_tokenizer_json
from view.conftest import TOKEN, open_client, opening_page, serving
from waiting import LIMIT_S

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'>{{777*7777}}"


def read_error(response):
    match = re.search(r'<p class="error" role="alert">(.*?)</p>', response.text, re.DOTALL)
    return unescape(match[1]) if match else ""


def cut(path):
    path.write_bytes(path.read_bytes()[:40])


@pytest.mark.parametrize(
    ("damage", "path", "message"),
    [
        (lambda store: cut(store / "train/shard_00000.bin"), "/documents", "shard_00000.bin has 40 bytes"),
        (lambda store: cut(store / "train/shard_00000.docs"), "/document/1", "shard_00000.docs: checksum differs"),
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
        assert response.status_code == 500
        assert message in read_error(response)
        assert "Back to the overview" in response.text
    assert "Traceback" not in capfd.readouterr().err


def test_a_damaged_document_is_named_and_leaves_the_others(tmp_path):
    store = write_store(tmp_path / "store", [[104, 105] * 20, [60, 98, 62], [106] * 50])
    ids = tmp_path / "store/train/shard_00000.bin"
    ids.write_bytes(ids.read_bytes()[:-10] + b"\xff" * 10)
    with serving(store.path) as address, open_client(address) as client:
        listed = client.get("/documents").text
        assert "(damaged: Run batchloom check on the store.)" in listed
        assert "hihihi" in listed
        response = client.get("/document/2")
        assert response.status_code == 500
        assert "batchloom check" in read_error(response)


def test_a_store_without_its_manifest_is_no_raw_input(tmp_path):
    write_store(tmp_path / "store", [[104, 105]])
    (tmp_path / "store/dataset_metadata.json").unlink()
    with pytest.raises(batchloom.StoreError, match=r"store whose dataset_metadata\.json is missing"):
        make_pages(ViewSpec(data=[str(tmp_path / "store")]))


def test_a_damaged_report_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    batchloom.prepare(tmp_path / "rows.jsonl", out=tmp_path / "store", tokenizer="bytes", val_fraction=0)
    with serving(tmp_path / "store") as address, open_client(address) as client:
        note = "The report of the preparation is damaged"
        assert note not in client.get("/").text
        (tmp_path / "store/report.json").write_text("{")
        assert note in client.get("/").text


def test_pages_follow_a_store_that_grows_shrinks_and_is_compacted(tmp_path):
    store = write_store(tmp_path / "store", [[104, 105], [60, 98, 62], [106] * 50])
    with serving(store.path) as address, open_client(address) as client:
        assert "There is no document 3" in read_error(client.get("/document/3"))
        append_documents(store.path, [[107] * 9])
        assert "kkkkkkkkk" in client.get("/document/3").text
        overview = client.get("/").text
        assert re.findall(r"<td>(prepared|appended)</td><td class=.number.>(\d+)</td>", overview) == [
            ("appended", "4"),
            ("prepared", "3"),
        ]
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


@pytest.fixture(scope="module")
def hostile_address(hostile_store):
    with serving(hostile_store) as address:
        yield address


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/documents", "/document/0", "/document/0?as=tokens", "/packing?seq_len=256&batch=1"),
        *("/documents?text=" + "%3Cscript%3E", "/documents?file=%3Cimg%20src=x%3E", "/packing?packing=%3Cb%3E"),
    ],
)
def test_markup_in_any_field_is_inert(hostile_address, page, path):
    page.goto(f"{hostile_address}/?token={TOKEN}")
    response = page.goto(hostile_address + path)
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


def test_a_document_of_two_megabytes_is_shown_in_parts(tmp_path):
    write_store(tmp_path / "store", [[97] * 2_000_000 + [122], [98]])
    with serving(tmp_path / "store") as address, open_client(address) as client:
        for path in ("/documents", "/document/0", "/document/0?as=tokens", "/packing?seq_len=4096", "/document/0/json"):
            response = client.get(path)
            assert response.status_code == 200
            assert len(response.text) < 1_000_000
        assert "z" in client.get("/document/0?at=1999999").text.partition("<main")[2]


@pytest.mark.slow
def test_two_browsers_and_twenty_requests_at_once(tmp_path):
    documents = [[97 + number % 26] * (number % 50 + 1) for number in range(200)]
    write_store(tmp_path / "store", documents, documents_per_shard=50)
    paths = ["/", "/documents", "/documents?text=zz", "/packing?seq_len=128&batch=4", "/packing/strategies?seq_len=64"]
    paths += [f"/document/{number}" for number in range(0, 200, 33)]
    with serving(tmp_path / "store") as address, open_client(address) as one, open_client(address) as other:
        expected = {path: one.get(path).text for path in paths}
        append_documents(tmp_path / "store", [[98] * 7])
        append_documents(tmp_path / "store", [[98] * 8])
        expected = {path: one.get(path).text for path in paths}
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            answers = pool.map(
                lambda number: (number, (one, other)[number % 2].get(paths[number % len(paths)])), range(44)
            )
            for number, response in answers:
                path = paths[number % len(paths)]
                assert response.status_code == 200
                # A search ends after a part of a second, so a busy machine searches fewer documents.
                assert response.text == expected[path] or "text=zz" in path


@pytest.mark.slow
def test_two_browsers_read_while_plans_are_made(browser, page, tmp_path):
    write_store(tmp_path / "store", [[97 + number % 26] * (1 + number % 60) for number in range(150)])
    with serving(tmp_path / "store") as address, opening_page(browser) as other:
        pages = [page, other]
        for opened in pages:
            opened.goto(f"{address}/?token={TOKEN}")
        for number in range(2):
            # Each plan is new, and both browsers ask for it at the same time.
            for opened in pages:
                opened.goto(f"{address}/packing?seq_len={100 + number}&batch=4", wait_until="commit")
            headings = [opened.locator("h1").inner_text() for opened in pages]
            assert headings == [f"Step 0 4 rows of {100 + number} tokens"] * 2
            pages[number % 2].get_by_role("link", name="Documents").click()
            pages[number % 2].locator("#list").wait_for()
        assert pages[0].locator("html").get_attribute("data-theme") is None
        pages[1].get_by_role("button", name="Switch between light and dark").click()
        assert pages[0].locator("html").get_attribute("data-theme") is None


def test_a_value_in_the_making_delays_only_those_who_need_it():
    cache, begun, release, made = ValueCache(2), threading.Event(), threading.Event(), []

    def make_slowly():
        begun.set()
        assert release.wait(LIMIT_S)
        made.append("slow")
        return "slow"

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        slow = [pool.submit(cache.get, "slow", 1, make_slowly) for _ in range(2)]
        assert begun.wait(LIMIT_S)
        assert [cache.get(name, 1, lambda name=name: name) for name in ("a", "b")] == ["a", "b"]
        release.set()
        assert [future.result(LIMIT_S) for future in slow] == ["slow", "slow"]
    assert made == ["slow"]
    assert cache.get("b", 1, lambda: "again") == "b"
    assert cache.get("b", 2, lambda: "again") == "again"
    # Two values stay: the least recently used one is made again.
    assert cache.get("a", 1, lambda: "again") == "again"


def test_an_error_while_a_value_is_made_is_not_kept():
    cache = ValueCache(1)
    with pytest.raises(ZeroDivisionError):
        cache.get("value", 1, lambda: 1 / 0)
    assert cache.get("value", 1, lambda: 5) == 5


def test_damaged_lines_of_the_quarantine_are_counted(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\nbroken\n')
    batchloom.prepare(tmp_path / "rows.jsonl", out=tmp_path / "store", tokenizer="bytes", max_bad=1, val_fraction=0)
    lines = ["{", "[1]", '{"reason": 5}', "\xff"]
    with (tmp_path / "store" / "quarantine.jsonl").open("a", encoding="latin-1") as file:
        file.write("\n".join(lines) + "\n")
        file.writelines(json.dumps({"source": "s", "line": n, "reason": "r"}) + "\n" for n in range(60))
    with serving(tmp_path / "store") as address, open_client(address) as client:
        text = unescape(client.get("/").text)
    names = ", ".join(f"quarantine.jsonl:{number}" for number in range(2, 6))
    assert f"4 lines of the quarantine are damaged and not shown: {names}." in text
    assert "And 11 more, in quarantine.jsonl of the store." in text
    assert "rows.jsonl" in text


def test_data_that_cannot_be_read_are_no_fault_of_the_request(tmp_path):
    write_store(tmp_path / "store", [[104, 105]])
    with serving(tmp_path / "store") as address, open_client(address) as client:
        (tmp_path / "store" / "quarantine.jsonl").symlink_to(tmp_path / "store" / "quarantine.jsonl")
        assert client.get("/").status_code == 200
        (tmp_path / "store" / "train" / "shard_00000.docs").unlink()
        (tmp_path / "store" / "train" / "shard_00000.docs").mkdir()
        answer = client.get("/document/0")
        assert answer.status_code == 500
        assert "shard_00000.docs" in read_error(answer)
        assert client.get("/document/9").status_code == 400


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_the_server_and_its_connections_quietly(tmp_path, number):
    write_store(tmp_path / "store", [[104, 105]])
    command = [sys.executable, "-m", "batchloom", "view", str(tmp_path / "store"), "--no-browser"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        httpx.Client(follow_redirects=True, timeout=LIMIT_S, verify=False) as client,
    ):
        # The connection stays open, as that of a browser does.
        assert client.get(process.stdout.readline().strip()).status_code == 200
        process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (0, "")


def test_a_number_out_of_its_bounds_is_refused(capsys):
    assert run_command_line(["view", "store", "--port", "70000"]) == 2
    assert "--port: 70000 is not a whole number from 0 to 65,535" in capsys.readouterr().err


def test_a_port_in_use_is_named(tmp_path, capsys):
    write_store(tmp_path / "store", [[104, 105]])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code = run_command_line(["view", str(tmp_path / "store"), "--port", str(port), "--no-browser"])
    assert code == 1
    assert (
        capsys.readouterr().err
        == f"batchloom: Port {port} cannot be used: address already in use. Give another --port, or leave it out.\n"
    )
