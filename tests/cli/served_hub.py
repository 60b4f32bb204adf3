"""A Hugging Face hub on loopback: as much of its HTTP API as the real client uses, and the ways in which it refuses."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_test"
_LARGE = 4096


class Repository:
    """Files by commit; `revisions` are names of commits. `access`: `public`, `gated` or `private`."""

    def __init__(self, access="public"):
        self.access = access
        self.commits = {}
        self.revisions = {}

    def commit(self, files, *names):
        """Add a commit with `files` (bytes by name) and let `names` point to it."""
        text = json.dumps({name: hashlib.sha256(data).hexdigest() for name, data in files.items()})
        sha = hashlib.sha1(f"{len(self.commits)}{text}".encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.revisions |= dict.fromkeys((*names, sha), sha)
        return sha


class Hub:
    """`repositories` by name. `log` has (method, path without query, Range header) of every request.

    `cuts[name]` is how many bytes of a file are sent before the connection breaks, once. Of the files `stalls` half is
    sent, and nothing after it until the hub ends.
    """

    def __init__(self):
        self.repositories = {}
        self.log = []
        self.cuts = {}
        self.stalls = set()
        self.ended = threading.Event()
        self.is_down = False
        self.url = ""

    def add(self, name, files, *revisions, access="public"):
        """A repository with one commit; its hash."""
        repository = self.repositories.setdefault(name, Repository(access))
        return repository.commit(files, *(revisions or ("main",)))

    def fetched(self):
        """Names of the files whose bytes were sent, in order."""
        return [path.rpartition("/")[2] for method, path, _ in self.log if method == "GET" and "/api/" not in path]


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_):
        """Clients may leave whenever they like."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        path = unquote(urlsplit(self.path).path)
        self.hub.log.append((self.command, path, self.headers.get("Range")))
        if self.hub.is_down:
            self._refuse(503, "", "the hub is down")
        elif path.startswith("/api/models/"):
            self._describe(path.removeprefix("/api/models/"))
        elif path.startswith("/cdn/"):
            sha, file = path.removeprefix("/cdn/").split("/", 1)
            self._send_file(next(r for r in self.hub.repositories.values() if sha in r.commits), sha, file)
        else:
            self._resolve(path)

    def _describe(self, path):
        name, _, revision = path.partition("/revision/")
        repository = self._allowed(name, is_listing=True)
        if repository is None:
            return
        sha = repository.revisions.get(revision or "main")
        if sha is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        siblings = [{"rfilename": file, "size": len(data)} for file, data in repository.commits[sha].items()]
        body = {"_id": "1", "id": name, "modelId": name, "sha": sha, "siblings": siblings, "private": False, "tags": []}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _resolve(self, path):
        name, _, rest = path[1:].partition("/resolve/")
        revision, _, file = rest.partition("/")
        repository = self._allowed(name, is_listing=False)
        if repository is None:
            return
        sha = repository.revisions.get(revision)
        if sha is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif file not in repository.commits[sha]:
            self._refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": sha})
        elif len(data := repository.commits[sha][file]) >= _LARGE:
            # As large files come: from elsewhere, and the ETag is that of the target.
            etag = hashlib.sha256(data).hexdigest()
            linked = {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data)), "X-Repo-Commit": sha}
            self._send(302, b"", linked | {"Location": f"{self.hub.url}/cdn/{sha}/{file}"})
        else:
            self._send_file(repository, sha, file)

    def _send_file(self, repository, sha, file):
        data = repository.commits[sha][file]
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        status, wanted = 200, self.headers.get("Range")
        if wanted is not None and self.command == "GET":
            begin = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            status, data = 206, data[begin:]
        if self.command == "GET" and file in self.hub.stalls:
            self._send(status, data, headers, len(data) // 2, waits=True)
            return
        cut = self.hub.cuts.pop(file, None) if self.command == "GET" else None
        self._send(status, data, headers, cut)

    def _allowed(self, name, *, is_listing):
        repository = self.hub.repositories.get(name)
        authorization = self.headers.get("Authorization")
        if authorization not in (None, f"Bearer {TOKEN}"):
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif repository is None or (repository.access == "private" and authorization is None):
            # Whoever has no token is not told which of the two it is.
            status = 401 if authorization is None else 404
            self._refuse(status, "RepoNotFound", "Invalid username or password." if status == 401 else "Not found")
        elif repository.access == "gated" and authorization is None and not is_listing:
            self._refuse(401, "GatedRepo", f"Access to model {name} is restricted.")
        else:
            return repository
        return None

    def _refuse(self, status, code, message, headers=None):
        named = {"X-Error-Code": code} if code else {}
        body = json.dumps({"error": message}).encode()
        self._send(status, body, {**named, "X-Error-Message": message, **(headers or {})})

    def _send(self, status, body, headers, cut=None, *, waits=False):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            if waits:
                self.hub.ended.wait()
            self.close_connection = True


@contextmanager
def served_hub():
    """A hub that is served as long as the block runs."""
    hub = Hub()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
