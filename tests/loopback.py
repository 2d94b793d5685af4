"""Loopback HTTP server that answers with a handler class."""

import threading
from contextlib import contextmanager
from http.server import ThreadingHTTPServer


@contextmanager
def serve_requests(handler):
    """Answer requests with ``handler``, a class of request handlers, and yield the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
