"""A browser and servers for the tests of the pages."""

import contextlib
import json
import os
import shutil
import socket
import threading

import httpx
import pytest

import batchloom
from batchloom.view import ViewSpec, make_pages, make_server
from golden.inputs import make_tokenizer_json
from media.sample_media import make_messages
from waiting import LIMIT_S, wait_until

TOKEN = "a-token-of-the-tests"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SIZE = {"width": 1280, "height": 800}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextlib.contextmanager
def serving(path, **options):
    """Serve the pages of a path on loopback; yield the address without a slash."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = make_server(make_pages(ViewSpec(data=[str(path)], **options)), TOKEN)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive(), "the server starts")
            assert server.started
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(LIMIT_S)
            assert not thread.is_alive()


@contextlib.contextmanager
def open_client(address):
    """Yield a client with the token.

    It serves several tests and leaves no connection behind. Certificates, which it does not need, would take longer to
    load than most pages.
    """
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=address, follow_redirects=True, timeout=LIMIT_S, verify=False, limits=limits) as client:
        client.get("/static/icon.svg", params={"token": TOKEN}).raise_for_status()
        yield client


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


@pytest.fixture(scope="package")
def browser(tmp_path_factory):
    """One browser for these tests. Its event loop runs until it is closed, and other tests start loops of their own."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        # A graphics card in software takes a tenth of the time of these tests.
        options = ["--no-sandbox", "--disable-gpu", "--disable-software-rasterizer"]
        # PulseAudio leaves a folder behind where it finds no other.
        environment = {**os.environ, "PULSE_RUNTIME_PATH": str(tmp_path_factory.mktemp("sound"))}
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=options, env=environment)
        yield chromium
        chromium.close()


@contextlib.contextmanager
def opening_page(browser):
    """Yield a page of a fresh browser profile."""
    context = browser.new_context(viewport=SIZE)
    context.set_default_timeout(1000 * LIMIT_S)
    yield context.new_page()
    context.close()


@contextlib.contextmanager
def forbidding_problems(page):
    """Fail if the page or its policy reports an error; ``page.problems`` lists those so far."""
    problems = page.problems = []
    listeners = {
        "console": lambda message: problems.append(message.text) if message.type in ("error", "warning") else None,
        "pageerror": lambda error: problems.append(str(error)),
        "dialog": lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    yield page
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    assert page.problems == []


@pytest.fixture(scope="package")
def shared_page(browser):
    """The page that tests use one after the other: a profile of its own takes longer than most of them."""
    with opening_page(browser) as page:
        yield page


@pytest.fixture
def page(shared_page):
    """A page without cookies and stored values; any error of the page or of its policy fails the test."""
    shared_page.context.clear_cookies()
    shared_page.set_viewport_size(SIZE)
    shared_page.emulate_media(color_scheme="light")
    try:
        with forbidding_problems(shared_page):
            yield shared_page
    finally:
        shared_page.evaluate("try { localStorage.clear() } catch { }")
        # An empty page asks for nothing more. Another address would start another process.
        shared_page.set_content("")


@pytest.fixture
def own_page(browser):
    """A page of a profile of its own, for a test that changes it for good."""
    with opening_page(browser) as page, forbidding_problems(page):
        yield page


@pytest.fixture(scope="package")
def address(chats):
    """Address of the pages of the conversations; other data override it."""
    with serving(chats) as served:
        yield served


@pytest.fixture
def opened(page, address):
    """A browser page with the token."""
    page.goto(f"{address}/?token={TOKEN}")
    return page
