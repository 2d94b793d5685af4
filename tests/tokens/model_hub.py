"""Local server that serves files of models like the Hub."""

import hashlib
from http.server import BaseHTTPRequestHandler

from loopback import serve_requests

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def serve_models(files):
    """Serve ``files``, bytes by (repository, name), and give the address."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self, *, body):
            path_parts = self.path.strip("/").split("/")
            repo, name = "/".join(path_parts[:2]), path_parts[-1]
            content = files.get((repo, name))
            if content is None:
                is_known = any(repo == repository for repository, _ in files)
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound" if is_known else "RepoNotFound")
                if is_known:
                    self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def log_message(self, *_args):
            pass

    return serve_requests(Handler)
