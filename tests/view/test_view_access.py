"""Who may read the pages, and what a page may load."""

import contextlib
import functools
import html
import http.server
import threading

import httpx
import pytest

from batchloom.testing import write_store
from view.conftest import TOKEN, open_client, serving


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("view") / "store"
    write_store(folder, [[104, 105], [60, 98, 62], [106] * 5000])
    with serving(folder) as served:
        yield served


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving_files(folder):
    """Serve a folder as another site: localhost is not 127.0.0.1."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://localhost:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def client(address):
    with open_client(address) as opened:
        yield opened


@pytest.fixture
def stranger(address):
    """A client without the token."""
    with httpx.Client(base_url=address, verify=False) as opened:
        yield opened


def test_a_page_needs_the_token(stranger):
    for path in ("/", "/documents", "/static/view.css", "/?token=wrong", "/documents?token="):
        response = stranger.get(path)
        assert response.status_code == 403, path
        assert "address that batchloom view printed" in response.text


def test_the_token_leaves_the_address_and_keeps_the_rest(stranger):
    response = stranger.get(f"/documents?least=3&token={TOKEN}")
    assert (response.status_code, response.headers["location"]) == (303, "/documents?least=3")
    cookie = response.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert TOKEN[:8] not in cookie.partition("=")[0]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "192.168.0.7", ""])
def test_a_foreign_host_is_refused_even_with_the_token(client, host):
    assert client.get("/", headers={"Host": host}).status_code == 403


def test_a_forwarded_port_is_allowed(client):
    assert client.get("/", headers={"Host": "localhost:9000"}).status_code == 200


def test_nothing_can_be_written(client):
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, "/documents").status_code == 405


@pytest.mark.parametrize(
    "path", ["/", "/documents", "/document/1", "/packing?seq_len=64", "/nothing", "/static/view.js"]
)
def test_every_answer_has_a_strict_policy(client, path):
    response = client.get(path)
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "server" not in response.headers


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/document/3", "There is no document 3"),
        ("/documents?least=few", "not a whole number"),
        ("/documents?text=(&mode=regex", "expression is invalid"),
        ("/documents?text=abc&mode=hash", "32 hex digits"),
        ("/documents?text=abc&mode=line", "FILE:LINE"),
        ("/documents?file=other.jsonl", "no input file"),
        ("/documents?side=chosen", "no documents of side"),
        ("/documents?media=smell", "no media of kind"),
        ("/packing?seq_len=0", "not a whole number"),
        ("/packing?packing=tetris", "tetris"),
        ("/packing?step=999999", "no step 999,999"),
        ("/?split=val", "no documents in subset"),
        ("/?source=other", "no source"),
    ],
)
def test_a_wrong_parameter_is_named(client, path, message):
    response = client.get(path)
    assert response.status_code == 400
    assert message in response.text


def test_static_files_cannot_be_left(client):
    assert client.get("/static/../pages.py").status_code == 404
    assert client.get("/document/" + "9" * 5_000).status_code == 404
    assert client.get("/static/%2e%2e/pages.py").status_code == 404


def test_a_link_on_another_web_page_opens_the_pages(page, address, tmp_path):
    # The other page is on another site: browsers send no strict cookie with its links, also not after a redirect.
    links = [f"{address}/documents?least=3&token={TOKEN}", f"{address}/documents?least=3", f"{address}/?token=wrong"]
    text = "".join(f'<a href="{html.escape(link)}">link {number}</a> ' for number, link in enumerate(links))
    (tmp_path / "links.html").write_text(text)
    with serving_files(tmp_path) as other_site:
        page.goto(f"{other_site}/links.html")
        page.get_by_text("link 1").click()
        page.wait_for_function("document.body.innerText.includes('it holds the token')")
        for link in ("link 0", "link 1"):
            page.goto(f"{other_site}/links.html")
            page.get_by_text(link).click()
            page.locator("#list").wait_for()
            assert page.url == f"{address}/documents?least=3"
        page.context.clear_cookies()
        page.goto(f"{other_site}/links.html")
        page.get_by_text("link 2").click()
        page.wait_for_function("document.body.innerText.includes('it holds the token')")
    # Chromium reports the status 403 and the missing icon of the other site as errors of the console.
    page.problems.clear()


@pytest.mark.slow
def test_the_forwarding_page_stays_on_this_server(stranger, address):
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    for path in ('//evil.example/"><script>', "/%22%3E%3Cscript%3E?a=%22%3E%3Cb%3E", "//evil.example"):
        response = stranger.get(address + path, headers=headers)
        assert response.status_code == 403
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "url=//" not in response.text
        assert "<script" not in response.text
        assert "set-cookie" not in response.headers
    embedded = stranger.get("/", headers={**headers, "Sec-Fetch-Mode": "no-cors"})
    assert (embedded.status_code, "refresh" in embedded.text) == (403, False)
    response = stranger.get(f"{address}//evil.example?token={TOKEN}")
    assert response.headers["location"] == "/evil.example"
