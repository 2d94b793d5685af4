"""A browser and servers for the tests of the pages."""

import contextlib
import json
import shutil
import socket
import threading
import time

import pytest

import batchloom
from batchloom.view import ViewSpec, make_pages, make_server
from golden.inputs import make_tokenizer_json
from media.sample_media import make_messages

TOKEN = "a-token-of-the-tests"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextlib.contextmanager
def serving(path, **options):
    """Serve the pages of a path on loopback; yield the address without a slash."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = make_server(make_pages(ViewSpec(data=[str(path)], **options)), TOKEN)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 30
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def write_chats(folder, rows=None):
    """Write a store of conversations with masks; by default one is hostile and one a duplicate."""
    if rows is None:
        rows = [{"messages": make_messages(f"What is {n} + {n}?", str(2 * n))} for n in range(120)]
        hostile = "<script>alert(1)</script><img src=x onerror=alert(2)>"
        rows.insert(7, {"messages": make_messages(hostile, "No.")})
        rows.append(rows[3])
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "not JSON\n")
    (folder / "tokenizer.json").write_text(make_tokenizer_json(CONTROL))
    batchloom.prepare(
        folder / "chats.jsonl",
        out=folder / "store",
        tokenizer=str(folder / "tokenizer.json"),
        template="chatml",
        train_on="assistant",
        max_bad=1,
        val_fraction=0,
    )


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """A store of conversations; write another one to change it."""
    folder = tmp_path_factory.mktemp("chats")
    write_chats(folder)
    return folder / "store"


@pytest.fixture(scope="module")
def browser():
    # Its event loop runs until it is closed, and other tests start loops of their own.
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser):
    """A page of a fresh browser profile; any error of the page or of its policy fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(20_000)
    opened = context.new_page()
    problems = []
    opened.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else 0)
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    opened.problems = problems
    yield opened
    context.close()
    assert problems == []


@pytest.fixture(scope="module")
def address(chats):
    """Address of the pages of the conversations; other data override it."""
    with serving(chats) as served:
        yield served


@pytest.fixture
def opened(page, address):
    """A browser page with the token."""
    page.goto(f"{address}/?token={TOKEN}")
    return page
