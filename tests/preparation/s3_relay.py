"""A relay before an S3 server on loopback: slow, breaking connections, answering for it, changing bytes."""

import http.client
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass
class Fault:
    """What happens to requests of ``method`` whose address holds ``part``.

    ``times`` of them, after the first ``spare``; ``does`` is ``answer`` (with ``status`` and ``code``),
    ``cut body`` (hang up in the middle of the request), ``cut answer`` (the server does it, and nobody
    hears), ``half answer`` (hang up in the middle of the answer), ``hang`` (no word for three seconds),
    ``flip`` (another byte arrives) or ``flip answer`` (another byte comes back).
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
    asked: list = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault(self, method, path):
        with self.lock:
            self.asked.append((method, path))
            for one in self.faults:
                if one.method == method and one.part in path and one.times:
                    if one.spare:
                        one.spare -= 1
                        continue
                    one.times -= 1
                    return one
        return None

    def puts(self):
        """The names of what was put, without the object that names the job."""
        names = [path.partition("?")[0] for method, path in self.asked if method == "PUT"]
        return [name for name in names if "/.work/" not in name]


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
        if does == "hang":
            time.sleep(3)
        if does == "flip" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        if does == "answer":
            data = f"<Error><Code>{fault.code}</Code><Message>k3yphrase</Message></Error>".encode()
            self.answer(fault.status, {"Content-Type": "application/xml"}, data)
            return
        kept = {name: value for name, value in self.headers.items() if name != "Expect"}
        # Also where the server is gone already: a socket left open is told of in another test.
        with closing(http.client.HTTPConnection(*relay.behind, timeout=30)) as connection:
            connection.request(self.command, self.path, body, kept)
            answer = connection.getresponse()
            data = answer.read()
        if does == "flip answer" and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if does == "cut answer":
            self.close_connection = True
            return
        leave = ("content-length", "connection", "date", "server", "transfer-encoding")
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in leave}
        if self.command == "HEAD" and "Content-Length" in answer.headers:
            headers["Content-Length"] = answer.headers["Content-Length"]
        self.answer(answer.status, headers, data, half=does == "half answer")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on  # noqa: N815

    def answer(self, status, headers, data, *, half=False):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        try:
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[: len(data) // 2] if half else data)
        except OSError:
            half = True
        if half:
            self.close_connection = True

    def log_message(self, *_args):
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """Connections break here on purpose."""


@contextmanager
def relaying(address):
    """A running relay before the server at ``address`` (``http://host:port``)."""
    place = urlsplit(address)
    relay = Relay((place.hostname, place.port))
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
