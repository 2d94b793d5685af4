"""Access to the pages from this machine, with the token and a strict policy."""

import hmac
import html
from http.cookies import CookieError, SimpleCookie
from typing import Any, final
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
        self._app, self._token = app, token
        # Browsers share the cookies of all ports of a host, and several servers may run.
        self._cookie = f"batchloom_{token[:8]}"

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
