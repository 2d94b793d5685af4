"""Relay before an S3 server that delays, breaks, answers or alters requests."""

import http.client
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass
class Fault:
    """Fault of requests of ``method`` whose address contains ``part``.

    It affects ``times`` requests after the first ``spare``. ``does`` is ``answer`` (reply with ``status`` and
    ``code``), ``cut body`` (hang up in the middle of the request), ``cut answer`` (run the request on the server
    and drop the reply), ``half answer`` (hang up in the middle of the reply), ``hang`` (wait three seconds),
    ``flip`` (alter a byte of the request) or ``flip answer`` (alter a byte of the reply).
    """

    does: str
    method: str = "PUT"
    part: str = ""
    times: int = 1
    spare: int = 0
    status: int = 503
    code: str = "SlowDown"


@dataclass
class Relay:
    behind: tuple = ()
    url: str = ""
    delay: float = 0.0
    faults: list = field(default_factory=list)
    requests: list = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault(self, method, path):
        with self.lock:
            self.requests.append((method, path))
            for fault in self.faults:
                if fault.method == method and fault.part in path and fault.times:
                    if fault.spare:
                        fault.spare -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None

    def puts(self):
        """Return the names of uploaded objects."""
        return [path.partition("?")[0] for method, path in self.requests if method == "PUT"]


class Handler(BaseHTTPRequestHandler):
    relay: Relay
    protocol_version = "HTTP/1.1"

    def pass_on(self):
        relay = self.relay
        fault = relay.fault(self.command, self.path)
        does = fault.does if fault else ""
        time.sleep(relay.delay)
        size = int(self.headers.get("Content-Length") or 0)
        if does == "cut body":
            self.rfile.read(size // 2)
            self.close_connection = True
            return
        body = self.rfile.read(size)
        if len(body) < size:
            # The client was killed. The server would wait for the rest.
            self.close_connection = True
            return
        if does == "hang":
            time.sleep(3)
        if does == "flip" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        if does == "answer":
            data = f"<Error><Code>{fault.code}</Code><Message>k3yphrase</Message></Error>".encode()
            self.answer(fault.status, {"Content-Type": "application/xml"}, data)
            return
        request_headers = {name: value for name, value in self.headers.items() if name != "Expect"}
        # Close the socket even if the server has stopped: an open one causes a warning in a later test.
        with closing(http.client.HTTPConnection(*relay.behind, timeout=30)) as connection:
            connection.request(self.command, self.path, body, request_headers)
            answer = connection.getresponse()
            data = answer.read()
        if does == "flip answer" and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if does == "cut answer":
            self.close_connection = True
            return
        dropped_headers = ("content-length", "connection", "date", "server", "transfer-encoding")
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in dropped_headers}
        if self.command == "HEAD" and "Content-Length" in answer.headers:
            headers["Content-Length"] = answer.headers["Content-Length"]
        self.answer(answer.status, headers, data, truncated=does == "half answer")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on  # noqa: N815

    def answer(self, status, headers, data, *, truncated=False):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        try:
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[: len(data) // 2] if truncated else data)
        except OSError:
            truncated = True
        if truncated:
            self.close_connection = True

    def log_message(self, *_args):
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """Ignore errors: connections break on purpose."""


@contextmanager
def run_relay(address):
    """Run a relay in front of the server at ``address`` (``http://host:port``)."""
    server_url = urlsplit(address)
    relay = Relay((server_url.hostname, server_url.port))
    server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"relay": relay}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    relay.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield relay
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
