"""A web server on loopback with range requests, delays and faults."""

import hashlib
import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from waiting import LIMIT_S


class Web:
    """Served files, faults and recorded requests.

    Attributes:
        files: content by path.
        answers: status codes by path, sent instead of the content.
        cut: number of bytes of a response before the connection closes.
        failures: number of next requests that are answered with 503.
        fails_after: number of next requests before all are answered with 503; None: never.
        delay: seconds before a response.
        ranges: True to answer range requests.
        requests: (method, path, range) of every request.
        held: number of requests that must arrive before the first one is answered.
        came_alone: whether they did not arrive.
    """

    def __init__(self):
        self.files, self.answers, self.requests = {}, {}, []
        self.cut, self.failures, self.delay, self.ranges = None, 0, 0.0, True
        self.url, self.fails_after = "", None
        self.held, self.came_alone, self._arrival = 0, False, threading.Condition()

    def wait_for_others(self):
        """Wait for the requests that must arrive before the first one is answered."""
        with self._arrival:
            self._arrival.notify_all()
            if not self._arrival.wait_for(lambda: len(self.requests) >= self.held, LIMIT_S):
                self.held, self.came_alone = 0, True

    def etag(self, path):
        return f'"{hashlib.sha1(self.files[path]).hexdigest()}"'


class Handler(BaseHTTPRequestHandler):
    web: Web
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        web, path = self.web, self.path.partition("?")[0]
        web.requests.append((self.command, self.path, self.headers.get("Range")))
        time.sleep(web.delay)
        web.wait_for_others()
        status = 503 if web.failures else web.answers.get(path, 200 if path in web.files else 404)
        web.failures = max(0, web.failures - 1)
        if web.fails_after is not None:
            status = status if web.fails_after else 503
            web.fails_after = max(0, web.fails_after - 1)
        if status == 200:
            self.send(web, path, body=body)
        else:
            self.empty(status)

    def send(self, web, path, *, body):
        data, match = web.files[path], None
        if web.ranges:
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, stop = 0, len(data)
        if match:
            start, stop = int(match[1]), min(int(match[2] or len(data)) + 1, len(data))
            if start >= len(data):
                self.empty(416, {"Content-Range": f"bytes */{len(data)}"})
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("ETag", web.etag(path))
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if not body:
            return
        try:
            if web.cut is not None and stop - start > web.cut:
                self.wfile.write(data[start : start + web.cut])
                self.close_connection = True
            else:
                self.wfile.write(data[start:stop])
        except OSError:
            self.close_connection = True

    def empty(self, status, headers=()):
        self.send_response(status)
        for header, value in dict(headers).items():
            self.send_header(header, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_args):
        pass


@contextmanager
def serve(handler=Handler, web=None):
    """Run a server of ``web``, with its address in ``web.url``."""
    web = web or Web()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (handler,), {"web": web}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    web.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
