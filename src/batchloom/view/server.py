"""Server of the pages, on 127.0.0.1 only, with a token."""

import atexit
import contextlib
import hashlib
import hmac
import html
import os
import secrets
import socket
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Annotated, Any, final
from urllib.parse import parse_qsl, quote, urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchloom.analysis import PlanRequest
from batchloom.core.errors import BatchloomError, InputError, StateError, StoreError, TokenizerError
from batchloom.core.files import describe_os_error
from batchloom.core.settings import Setting, find_problems, raise_problems
from batchloom.store import write_file
from batchloom.store.format import CHECK_REMEDY
from batchloom.view.page_rendering import STATIC_FOLDER, render
from batchloom.view.pages import Pages, RawInputPages, make_page_file
from batchloom.view.target import PlanChoice, ViewTarget, is_raw_input

_LOCAL_HOSTS = {"127.0.0.1", "localhost"}
_TOKEN_PARAMETER = "token"  # noqa: S105 - the name of the parameter
# Data is untrusted: even if a document became markup, the browser would run and load nothing of it.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@final
class AccessGuard:
    """ASGI middleware that refuses foreign hosts and requests without the token.

    The first page is opened with the token in its address; it becomes a cookie, so that links to share hold none.

    Args:
        app: the guarded application.
        token: the token of this server.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token
        # Browsers share the cookies of all ports of a host, and several servers may run.
        self._cookie = f"batchloom_{hashlib.sha256(token.encode()).hexdigest()[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refuse(scope)
        await (refusal or self._app)(scope, receive, _add_headers(send))

    def _refuse(self, scope: Scope) -> Response | None:
        """Return the response to a request without access; None if it has access."""
        headers = Headers(scope=scope)
        host = headers.get("host", "").rpartition(":")
        if (host[0] or host[2]) not in _LOCAL_HOSTS:
            # Another site can point its own name at this machine, and would then read the answers.
            return PlainTextResponse("This page answers only on 127.0.0.1 and localhost.\n", 403)
        request = Request(scope)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("Only GET and HEAD are supported.\n", 405)
        given = request.query_params.get(_TOKEN_PARAMETER)
        if given is not None and hmac.compare_digest(given.encode(), self._token.encode()):
            # A link to share holds no token.
            query = [pair for pair in parse_qsl(scope["query_string"].decode("latin-1")) if pair[0] != _TOKEN_PARAMETER]
            address = _make_address(scope, urlencode(query))
            response: Response = RedirectResponse(address, 303)
            if _is_cross_site(headers):
                response = _make_forwarding_page(address, 200)
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return response
        if hmac.compare_digest(_read_cookie(headers, self._cookie).encode(), self._token.encode()):
            return None
        if _is_cross_site(headers) and headers.get("sec-fetch-mode") == "navigate":
            # The browser may have the cookie, but sends it only with requests of this site.
            return _make_forwarding_page(_make_address(scope, scope["query_string"].decode("latin-1")), 403)
        return PlainTextResponse("Open the address that batchloom view printed: it holds the token.\n", 403)


def _is_cross_site(headers: Headers) -> bool:
    """Return whether another web page or a local file made the request.

    A browser then sends no strict cookie, also not after a redirect.
    """
    return headers.get("sec-fetch-site") in ("cross-site", "same-site")


def _make_address(scope: Scope, query: str) -> str:
    # Two slashes would name another host.
    return quote("/" + scope["path"].lstrip("/")) + (f"?{query}" if query else "")


def _make_forwarding_page(address: str, status: int) -> Response:
    """Return a page that opens an address of this server, with the strict cookie."""
    target = html.escape(address)
    return HTMLResponse(
        f'<!DOCTYPE html><meta http-equiv="refresh" content="0; url={target}"><title>batchloom</title>'
        f'<a href="{target}">Open batchloom view</a>\n',
        status,
    )


def _read_cookie(headers: Headers, name: str) -> str:
    try:
        cookies: SimpleCookie = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookies[name].value if name in cookies else ""


def _add_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            names: dict[str, Any] = {name.lower(): value for name, value in _HEADERS.items()}
            message["headers"] = [
                *message.get("headers", []),
                *((name.encode(), value.encode()) for name, value in names.items()),
            ]
        await send(message)

    return send_with_headers


_HOST = "127.0.0.1"
_PREPARE_REMEDY = "Prepare these inputs first: batchloom prepare INPUT... --out STORE."


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSpec:
    """Settings of the server.

    Attributes:
        data: a store's folder, URL, prefix or synthetic name; the YAML file of a mixture; the folder or log of a
            run; or raw inputs.
    """

    data: Sequence[str]
    store: Annotated[str | None, Setting(help="Store of a run: its folder or URL.")] = None
    mixture: Annotated[
        str | None, Setting(help="Mixture of a run: its YAML file, or PATH=WEIGHT,PATH=WEIGHT with its stores.")
    ] = None
    checkpoint: Annotated[
        Path | None,
        Setting(
            help="Folder of a checkpoint, or JSON file of a loader's state, of a run.",
            shown_default="the newest in the folder of the run",
        ),
    ] = None
    split: Annotated[str, Setting(help="Subset that is shown first: train, val or test.")] = "train"
    generation: Annotated[int | None, Setting(help="Generation of the store.", shown_default="the newest")] = None
    port: Annotated[int, Setting(help="Port of the page.", minimum=0, maximum=65535, shown_default="a free one")] = 0
    browser: Annotated[bool, Setting(help="Open the page in a browser, if there is a display.")] = True
    step: Annotated[int | None, Setting(help="Open the page of this step.", minimum=0)] = None
    seq_len: Annotated[int, Setting(help="Tokens of a row on the page of a step.", minimum=1)] = 2048
    global_batch_size: Annotated[int, Setting(help="Rows of a step on its page.", minimum=1)] = 8
    document: Annotated[int | None, Setting(help="Open the page of this document.", minimum=0)] = None
    out: Annotated[
        Path | None, Setting(help="Write the page to one HTML file, to share it, instead of serving it.")
    ] = None


def make_pages(spec: ViewSpec) -> Pages | RawInputPages:
    """Return the pages of the data.

    Raises:
        InputError: there is no such data.
        StoreError: a store is damaged.
    """
    if _has_raw_inputs(spec):
        if spec.step is not None or spec.document is not None:
            raise InputError(f"--step and --document show prepared data. {_PREPARE_REMEDY}")
        return RawInputPages(spec.data)
    target = _open_target(spec)
    for name in target.source_names:
        target.open_store(name)
    return Pages(target)


def _has_raw_inputs(spec: ViewSpec) -> bool:
    return len(spec.data) > 1 or is_raw_input(spec.data[0])


def _open_target(spec: ViewSpec) -> ViewTarget:
    run_request = PlanRequest(store=spec.store, mixture=spec.mixture, checkpoint=spec.checkpoint)
    choice = PlanChoice(seq_len=spec.seq_len, global_batch_size=spec.global_batch_size)
    target = ViewTarget(
        spec.data[0], split=spec.split, generation=spec.generation, run_request=run_request, choice=choice
    )
    if run_request != PlanRequest() and target.kind != "run":
        raise InputError(
            f"--store, --mixture and --checkpoint belong to a run: {spec.data[0]} is no folder or log of one."
        )
    return target


def make_server(pages: Pages | RawInputPages, token: str) -> uvicorn.Server:
    """Return the server of pages, to be run on a listening socket.

    Args:
        pages: the pages.
        token: the token that the first address must hold.
    """
    app = Starlette(
        routes=[*pages.list_routes(), Mount("/static", StaticFiles(directory=STATIC_FOLDER))],
        exception_handlers={
            BatchloomError: _show_error,
            HTTPException: _show_error,
            OSError: _show_error,
            500: _show_error,
        },
    )
    config = uvicorn.Config(
        AccessGuard(app, token),
        log_level="warning",
        server_header=False,
        lifespan="off",
        # Ctrl-C ends a page in the making, too.
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


def _show_error(request: Request, error: Exception) -> Response:
    """Show the message of an error, with status 400 for a request and 500 for data."""
    message = str(error)
    status = 400
    if isinstance(error, HTTPException):
        status = error.status_code
        if status == 404:
            message = f"There is no page {request.url.path}."
    elif isinstance(error, TokenizerError):
        # The ids of a store fit its tokenizer, unless one of them is damaged.
        message = f"{error}. {CHECK_REMEDY}"
        status = 500
    elif isinstance(error, BatchloomError):
        if isinstance(error, StoreError | StateError | OSError):
            status = 500
    elif isinstance(error, OSError):
        message = f"{error.filename or 'A file'} cannot be read: {describe_os_error(error)}."
        status = 500
    else:
        message = "This page failed because of a bug in batchloom. The terminal of the server shows the traceback."
        status = 500
    return HTMLResponse(render("error.html.j2", {"message": message}), status, {"Cache-Control": "no-store"})


def write_view(spec: ViewSpec, path: Path) -> str:
    """Write the page that ``spec`` names to one file, and return what it shows.

    Raises:
        InputError: there is no such page, or the data are raw inputs.
        StoreError: a store is damaged.
        OutputError: the file cannot be written.
    """
    if _has_raw_inputs(spec):
        raise InputError(f"--out writes a page of prepared data. {_PREPARE_REMEDY}")
    _check_spec(spec)
    target = _open_target(spec)
    target.require_data()
    content, html = make_page_file(target, target.choice, step=spec.step, document=spec.document)
    write_file(path, html.encode())
    return content


def _check_spec(spec: ViewSpec) -> None:
    raise_problems(find_problems(spec))
    if spec.step is not None and spec.document is not None:
        raise InputError(f"Step {spec.step:,} and document {spec.document:,} have a page each: give one of them.")


def serve_view(spec: ViewSpec, print_line: Callable[[str], None]) -> None:
    """Serve the pages until the process is interrupted.

    Args:
        spec: the settings.
        print_line: function that prints the address, and how to reach it from another machine.

    Raises:
        InputError: the port is taken, or the path cannot be shown.
        StoreError: a store is damaged.
    """
    _check_spec(spec)
    pages = make_pages(spec)
    token = secrets.token_urlsafe(24)
    first_page = pages.first_page if spec.document is None else f"/document/{spec.document}"
    if spec.step is not None:
        first_page = f"/packing?step={spec.step}"
    with _listen(spec.port) as listener:
        port = listener.getsockname()[1]
        address = f"http://{_HOST}:{port}{first_page}{'&' if '?' in first_page else '?'}token={token}"
        print_line(address)
        if not _has_display():
            print_line(f"No display here. On your own machine: ssh -N -L {port}:{_HOST}:{port} {socket.gethostname()}")
        elif spec.browser:
            _open_browser(address)
        # Ctrl-C is how the server is meant to end; uvicorn raises it again after its own clean-up.
        with contextlib.suppress(KeyboardInterrupt):
            make_server(pages, token).run(sockets=[listener])


def _open_browser(address: str) -> None:
    """Open a browser without the token on its command line, which others may read."""
    descriptor, name = tempfile.mkstemp(suffix=".html")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f'<meta http-equiv="refresh" content="0; url={address}">')
    webbrowser.open(Path(name).as_uri())
    atexit.register(Path(name).unlink, missing_ok=True)


def _listen(port: int) -> socket.socket:
    # With the protocol, asyncio switches off Nagle's algorithm, which would delay each answer by 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_HOST, port))
        # A browser may connect as soon as the address is printed, before the server accepts.
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise InputError(
            f"Port {port} cannot be used: {describe_os_error(error)}. Give another --port, or leave it out."
        ) from error
    return listener


def _has_display() -> bool:
    if sys.platform == "darwin":
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
