"""A Hugging Face Hub on loopback: as much of its HTTP as `from_pretrained` and `load_dataset` use.

Serves `root/models/OWNER/NAME/…` and `root/datasets/OWNER/NAME/…` under every revision. A repository with a file
`.gated` answers as a gated one does without a token.

What goes wrong is ordered by `server.trouble`, a function of a request's method and path: None, a status ("503"; "429" asks
to come again after a second), "cut" (half of what was promised), "silent" (nothing for `server.silence` seconds).
"""

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
API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?$")
RESOLVE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer()

    def do_HEAD(self):
        self._answer()

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self._answer(body)

    def _answer(self, body: str = ""):
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        self.trouble = self.server.trouble(self.command, path)
        if self.trouble == "silent":
            time.sleep(self.server.silence)
            self.close_connection = True
            return None
        if self.trouble and self.trouble.isdecimal():
            again = {"Retry-After": "1"} if self.trouble == "429" else {}
            return self._json(int(self.trouble), {"error": "in trouble"}, again)
        if match := API.match(path):
            kind, repo, what, _, inside = match.groups()
            return self._api(self._repo(kind, repo), repo, what, inside or "", body)
        if match := RESOLVE.match(path):
            kind, repo, _, name = match.groups()
            return self._file(self._repo("datasets" if kind else "models", repo), name)
        self._json(404, {"error": "no such address"})

    def _repo(self, kind: str, repo: str) -> Path:
        return self.server.root / kind / repo

    def _refused(self, folder: Path) -> bool:
        """The hub's answers for what is not there and for what needs accepted terms."""
        if not folder.is_dir():
            self._json(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif (folder / ".gated").exists():
            message = "Access to model is restricted"
            self._json(403, {"error": message}, {"X-Error-Code": "GatedRepo", "X-Error-Message": message})
        return not folder.is_dir() or (folder / ".gated").exists()

    def _api(self, folder: Path, repo: str, what: str | None, inside: str, body: str):
        if not folder.is_dir():
            return self._refused(folder)
        files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        if what in (None, "revision"):
            return self._json(200, {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
        if what == "tree":
            wanted = [name for name in files if name.startswith(f"{inside}/" if inside else "")]
        else:
            asked = json.loads(body)["paths"] if body.startswith("{") else re.findall(r"paths=([^&]*)", unquote(body))
            wanted = [name for name in files if name in asked or any(name.startswith(f"{folder}/") for folder in asked)]
        entries = [{"type": "file", "path": n, "size": (folder / n).stat().st_size, "oid": _oid(folder / n)} for n in wanted]
        folders = {parent.as_posix() for n in wanted for parent in Path(n).parents if parent.as_posix() not in (".", inside)}
        entries += [{"type": "directory", "path": name, "size": 0, "oid": COMMIT} for name in sorted(folders)]
        self._json(200, entries)

    def _file(self, folder: Path, name: str):
        if self._refused(folder):
            return
        file = folder / name
        if not file.is_file():
            return self._json(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        size, status, headers = file.stat().st_size, 200, {}
        start, end = 0, size
        if match := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(match[1]), min(int(match[2] or size), size - 1) + 1
            headers["Content-Range"], status = f"bytes {start}-{end - 1}/{size}", 206
        headers |= {"ETag": f'"{_oid(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        with file.open("rb") as content:
            content.seek(start)
            self._send(status, content, end - start, "application/octet-stream", headers)

    def _json(self, status: int, value, headers: dict | None = None):
        content = json.dumps(value).encode()
        self._send(status, io.BytesIO(content), len(content), "application/json", headers or {})

    def _send(self, status: int, content, length: int, kind: str, headers: dict):
        """Answers with the next `length` bytes of `content`, a file, which may be larger than memory."""
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": length, **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.trouble == "cut":
            length, self.close_connection = length // 2, True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while self.command != "HEAD" and (part := content.read(min(length, 2**20))):
                self.wfile.write(part)
                length -= len(part)

    def log_message(self, *args):
        pass


def _oid(file: Path) -> str:
    """Another one for every version of a file, without reading it: weights have gigabytes."""
    return hashlib.sha1(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}".encode()).hexdigest()


@contextlib.contextmanager
def serve(root: Path):
    """Serves `root` on a free port of 127.0.0.1; yields the server, with `url` and the `requests` it saw."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.root, server.requests = root, []
    server.trouble, server.silence = lambda method, path: None, 2
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
