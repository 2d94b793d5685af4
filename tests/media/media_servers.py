"""Loopback servers: one serves files, one never answers."""

import socket
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from loopback import serve_requests


def serve_files(files):
    class FileHandler(BaseHTTPRequestHandler):
        def do_GET(self):
            data = files.get(self.path)
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            self.wfile.write(data or b"")

        def log_message(self, *_):
            pass

    return serve_requests(FileHandler)


@contextmanager
def open_silent_server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
