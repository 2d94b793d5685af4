"""A stand-in for the Hugging Face Hub on loopback, with faults.

It answers the requests of the real libraries: a repository and its commit, its tree, details of single paths,
and files with ranges.
"""

import hashlib
import json
import re
from contextlib import contextmanager
from urllib.parse import parse_qs, unquote

from sources.web_server import Handler, Web, serve

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEXT_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
API = re.compile(r"/api/datasets/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?")
FILE = re.compile(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.*)")


class Hub(Web):
    """Files by path by repository in ``repos``, and names of gated repositories."""

    def __init__(self, repos):
        super().__init__()
        self.repos, self.gated, self.commit = repos, set(), COMMIT
        self.tokens = set()


class HubHandler(Handler):
    def do_POST(self):  # noqa: N802
        size = int(self.headers.get("Content-Length", 0))
        self.posted = self.rfile.read(size)
        self.answer(body=True)

    def answer(self, *, body):
        hub, path = self.web, unquote(self.path.partition("?")[0])
        hub.tokens.add(self.headers.get("Authorization"))
        match = FILE.fullmatch(path)
        if match:
            repo, revision, inside = match.groups()
            files = self.find_files(repo, revision)
            if files is None:
                hub.requests.append((self.command, path, None))
            elif inside in files:
                hub.files[path] = files[inside]
                super().answer(body=body)
            else:
                hub.requests.append((self.command, path, None))
                self.refuse(404, "EntryNotFound")
            return
        hub.requests.append((self.command, path, None))
        match = API.fullmatch(path)
        if not match:
            self.refuse(404, "RepoNotFound")
            return
        repo, resource, revision, inside = match.groups()
        files = self.find_files(repo, revision or "main")
        if files is not None:
            self.send_json(self.describe(repo, files, resource, inside or ""))

    def find_files(self, repo, revision):
        """Return the files of a repository at a revision, or None after refusing."""
        hub = self.web
        if repo not in hub.repos:
            self.refuse(401, "RepoNotFound")
        elif repo in hub.gated:
            self.refuse(403, "GatedRepo")
        elif revision not in ("main", hub.commit, COMMIT):
            self.refuse(404, "RevisionNotFound")
        else:
            return hub.repos[repo]
        return None

    def describe(self, repo, files, resource, inside):
        if resource == "tree":
            prefix = f"{inside}/" if inside else ""
            below = {path: data for path, data in files.items() if path.startswith(prefix)}
            return self.list_tree(prefix, below, deep="recursive=true" in self.path.lower())
        if resource == "paths-info":
            paths = parse_qs(self.posted.decode())["paths"]
            return self.make_entries({path: data for path, data in files.items() if path in paths})
        siblings = [{"rfilename": path} for path in files]
        return {
            "id": repo,
            "sha": self.web.commit,
            "siblings": siblings,
            "private": False,
            "tags": [],
        }

    def list_tree(self, prefix, files, *, deep):
        above = {path.rsplit("/", count)[0] for path in files for count in range(1, path.count("/") + 1)}
        folders = sorted(path for path in above if path.startswith(prefix) and path + "/" != prefix)
        entries = [{"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in folders]
        entries += self.make_entries(files)
        return [entry for entry in entries if deep or "/" not in entry["path"][len(prefix) :]]

    def make_entries(self, files):
        return [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for path, data in files.items()
        ]

    def send_json(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, status, code):
        self.empty(status, {"X-Error-Code": code, "X-Error-Message": code})

    def end_headers(self):
        self.send_header("X-Repo-Commit", self.web.commit)
        super().end_headers()


@contextmanager
def serve_hub(repos):
    with serve(HubHandler, Hub(repos)) as hub:
        yield hub
