"""Who may read the pages, and what a page may load."""

import httpx
import pytest

from batchloom.testing import write_store
from view.conftest import TOKEN, serving


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("view") / "store"
    write_store(folder, [[104, 105], [60, 98, 62], [106] * 5000])
    with serving(folder) as served:
        yield served


@pytest.fixture
def client(address):
    with httpx.Client(base_url=address, follow_redirects=True) as opened:
        opened.get("/", params={"token": TOKEN}).raise_for_status()
        yield opened


def test_a_page_needs_the_token(address):
    for path in ("/", "/documents", "/static/view.css", "/?token=wrong", "/documents?token="):
        response = httpx.get(address + path)
        assert response.status_code == 403, path
        assert "address that batchloom view printed" in response.text


def test_the_token_leaves_the_address_and_keeps_the_rest(address):
    response = httpx.get(f"{address}/documents?least=3&token={TOKEN}")
    assert (response.status_code, response.headers["location"]) == (303, "/documents?least=3")
    cookie = response.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie


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
    assert client.get("/static/%2e%2e/pages.py").status_code == 404
