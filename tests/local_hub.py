"""A Hugging Face Hub on this machine, with the part of its HTTP API that `from_pretrained` and `load_dataset` use.

Serves `root/models/OWNER/NAME/…` and `root/datasets/OWNER/NAME/…` under every revision. A repository with a file
`.gated` answers as a gated one does without a token. `server.users` has the answer of whoami for each token. A user can make
repositories and upload files to them; a file `.private` marks a private one. `server.commit` is the newest commit of all.

`server.failure` is a function of a request's method and path that returns how the request fails: None, a status ("503"; "429"
has a Retry-After of one second), "incomplete" (half of the promised bytes) or "silent" (nothing for `server.silent_seconds`).
"""

import base64
import contextlib
import hashlib
import http.server
import io
import json
import re
import threading
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0" * 40
AUTH_CHECK = re.compile(r"/api/models/(.+)/auth-check/write$")
COMMIT_API = re.compile(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/([^/]+)$")
LFS = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch$")
API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?$")
RESOLVE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")


def may_write(user: dict | None, name: str) -> bool:
    """Whether a user, as whoami describes them, may write to a repository."""
    owners = [user["name"], *(org["name"] for org in user["orgs"])] if user else []
    return name.split("/")[0] in owners and user["auth"]["accessToken"]["role"] == "write"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode())

    do_GET = do_HEAD = do_POST

    def do_PUT(self):
        """A large file, by its SHA-256; the commit that follows names the file."""
        self.server.objects[self.path.rsplit("/", 1)[-1]] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(is_stored=True)

    def _answer(self, body: str = "", is_stored: bool = False):
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        self.failure = self.server.failure(self.command, path)
        if self.failure == "silent":
            time.sleep(self.server.silent_seconds)
            self.close_connection = True
            return None
        if self.failure and self.failure.isdecimal():
            headers = {"Retry-After": "1"} if self.failure == "429" else {}
            return self._json(int(self.failure), {"error": "a failure that a test asked for"}, headers)
        if is_stored:
            return self._json(200, {})
        user = self.server.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if path == "/api/whoami-v2":
            return self._json(200, user) if user else self._json(401, {"error": "Invalid credentials in Authorization header"})
        if path in ("/api/repos/create", "/api/validate-yaml") or COMMIT_API.match(path) or LFS.match(path):
            return self._write(user, path, body) if user else self._json(403, {"error": "Forbidden"})
        if match := AUTH_CHECK.match(path):
            return self._json(200, {}) if may_write(user, match[1]) else self._json(403, {"error": "Forbidden"})
        if match := API.match(path):
            kind, repo, call, _, folder = match.groups()
            return self._api(self._repo(kind, repo), repo, call, folder or "", body)
        if match := RESOLVE.match(path):
            kind, repo, revision, name = match.groups()
            self.commit = revision if len(revision) == len(COMMIT) else self.server.commit
            return self._file(self._repo("datasets" if kind else "models", repo), name)
        self._json(404, {"error": "no such address"})

    def _write(self, user: dict, path: str, body: str):
        """The steps of an upload: make the repository, ask how to send each file, send the large ones, commit."""
        if path == "/api/validate-yaml":
            return self._json(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or user['name']}/{wanted['name']}"
            folder = self._repo("models", name)
            if not may_write(user, name):
                return self._json(403, {"error": "Forbidden"})
            if folder.exists():
                return self._json(409, {"error": "You already created this model repo", "url": f"{self.server.url}/{name}"})
            folder.mkdir(parents=True)
            if wanted.get("private") or wanted.get("visibility") == "private":
                (folder / ".private").touch()
            return self._json(200, {"url": f"{self.server.url}/{name}", "name": name})
        if LFS.match(path):
            href = f"{self.server.url}/objects/"
            objects = [one | {"actions": {"upload": {"href": href + one["oid"]}}} for one in json.loads(body)["objects"]]
            return self._json(200, {"transfer": "basic", "objects": objects})
        name, call, _ = COMMIT_API.match(path).groups()
        if call == "preupload":
            modes = {True: "lfs", False: "regular"}
            files = [one | {"uploadMode": modes[one["path"].endswith("safetensors")]} for one in json.loads(body)["files"]]
            return self._json(200, {"files": [one | {"shouldIgnore": False} for one in files]})
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "lfsFile":
                content = self.server.objects[value["oid"]]
            elif line["key"] == "file":
                content = base64.b64decode(value["content"])
            else:
                continue
            file = self._repo("models", name) / value["path"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        return self._json(200, {"success": True, "commitOid": COMMIT, "commitUrl": f"{self.server.url}/{name}/commit/{COMMIT}"})

    def _repo(self, kind: str, repo: str) -> Path:
        return self.server.root / kind / repo

    def _refuse(self, folder: Path) -> bool:
        """Answers if the repository does not exist or is gated; returns whether it has answered."""
        if not folder.is_dir():
            self._json(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif (folder / ".gated").exists():
            message = "Access to model is restricted"
            self._json(403, {"error": message}, {"X-Error-Code": "GatedRepo", "X-Error-Message": message})
        return not folder.is_dir() or (folder / ".gated").exists()

    def _api(self, repository: Path, name: str, call: str | None, folder: str, body: str):
        if not repository.is_dir():
            return self._refuse(repository)
        files = sorted(path.relative_to(repository).as_posix() for path in repository.rglob("*") if path.is_file())
        if call in (None, "revision"):
            siblings = [{"rfilename": file, "size": (repository / file).stat().st_size} for file in files]
            is_private = (repository / ".private").exists()
            return self._json(200, {"id": name, "sha": self.server.commit, "siblings": siblings, "private": is_private})
        if call == "tree":
            wanted = [file for file in files if file.startswith(f"{folder}/" if folder else "")]
        else:
            paths = json.loads(body)["paths"] if body.startswith("{") else re.findall(r"paths=([^&]*)", unquote(body))
            wanted = [file for file in files if file in paths or any(file.startswith(f"{path}/") for path in paths)]
        entries = []
        for file in wanted:
            path = repository / file
            entries.append({"type": "file", "path": file, "size": path.stat().st_size, "oid": _object_id(path)})
        folders = {parent.as_posix() for file in wanted for parent in Path(file).parents} - {".", folder}
        entries += [{"type": "directory", "path": path, "size": 0, "oid": COMMIT} for path in sorted(folders)]
        self._json(200, entries)

    def _file(self, repository: Path, name: str):
        if self._refuse(repository):
            return
        file = repository / name
        if not file.is_file():
            return self._json(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.commit})
        size, status, headers = file.stat().st_size, 200, {}
        start, end = 0, size
        if match := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(match[1]), min(int(match[2] or size), size - 1) + 1
            headers["Content-Range"], status = f"bytes {start}-{end - 1}/{size}", 206
        headers |= {"ETag": f'"{_object_id(file)}"', "X-Repo-Commit": self.commit, "Accept-Ranges": "bytes"}
        with file.open("rb") as content:
            content.seek(start)
            self._send(status, content, end - start, "application/octet-stream", headers)

    def _json(self, status: int, value, headers: dict | None = None):
        content = json.dumps(value).encode()
        self._send(status, io.BytesIO(content), len(content), "application/json", headers or {})

    def _send(self, status: int, content, length: int, kind: str, headers: dict):
        """Answers with the next `length` bytes of the open file `content`, which can be larger than memory."""
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": length, **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.failure == "incomplete":
            length, self.close_connection = length // 2, True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while self.command != "HEAD" and (part := content.read(min(length, 2**20))):
                self.wfile.write(part)
                length -= len(part)

    def log_message(self, *args):
        pass


def _object_id(file: Path) -> str:
    """A different ID for every version of a file, without reading the file: weights have gigabytes."""
    return hashlib.sha1(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}".encode()).hexdigest()


@contextlib.contextmanager
def serve(root: Path, port: int = 0):
    """Serves `root` on a port of 127.0.0.1, by default a free one; yields the server, with `url` and `requests`."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.root, server.requests, server.users, server.objects = root, [], {}, {}
    server.commit = COMMIT
    server.failure, server.silent_seconds = lambda method, path: None, 2
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
