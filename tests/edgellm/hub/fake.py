"""A web server for tests that plays a file host and a hub, with faults on order."""

import hashlib
import json
import os
import struct
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "abcd"


def blob(size: int = 300_000) -> bytes:
    """Bytes that pass for a model while nobody reads them."""
    return b"GGUF" + os.urandom(size - 4)


def gguf(name: str = "tiny", size: int = 0, template: str | None = None) -> bytes:
    """A file with metadata and no tensors, padded to a size."""

    def text(value: str) -> bytes:
        raw = value.encode()
        return struct.pack("<Q", len(raw)) + raw

    pairs = {"general.architecture": "llama", "general.name": name, "general.license": "mit"}
    if template is not None:
        pairs["tokenizer.chat_template"] = template
    body = b"".join(text(key) + struct.pack("<I", 8) + text(value) for key, value in pairs.items())
    body += text("llama.context_length") + struct.pack("<II", 4, 512)
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs) + 1) + body
    return head + bytes(max(0, size - len(head)))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Fault:
    """What one answer does wrong. `after` bytes of the body are sent first."""

    kind: str  # cut, stall, status, redirect, claim, plain, chunked, gzip, endless, shifted, other
    after: int = 0
    status: int = 0
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    data: bytes = b""


class Server:
    """Serves `files`; a fault queued for a path spoils one answer each."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.etags = True
        self.faults: dict[str, deque[Fault]] = defaultdict(deque)
        self.log: list[tuple[str, str, dict[str, str], int]] = []  # method, path, headers, status
        self.pace = 0.0  # seconds a 64 kB takes
        self.repos: dict[str, dict[str, bytes]] = {}
        self.token = ""  # repositories need it if it is set
        self.elsewhere: Server | None = None  # where large files lie
        self.commit = COMMIT
        handler = type("Handler", (_Handler,), {"fake": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def fault(self, path: str, *faults: Fault) -> None:
        self.faults[path].extend(faults)

    def requests(self, path: str) -> list[dict[str, str]]:
        return [headers for _, where, headers, _ in self.log if where == path]


class _Handler(BaseHTTPRequestHandler):
    fake: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        headers = {key.lower(): value for key, value in self.headers.items()}
        self.fake.log.append((self.command, unquote(urlsplit(self.path).path), headers, int(code)))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        try:
            if path.startswith("/api/models/"):
                self._model_info(path.removeprefix("/api/models/"))
            elif "/resolve/" in path and path not in self.fake.files:
                self._resolve(path)
            elif path in self.fake.files:
                self._file(path, self.fake.files[path])
            else:
                self._plain(404, b"no such thing")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _plain(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _allowed(self, repo: str) -> bool:
        if repo not in self.fake.repos:
            self._plain(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            return False
        sent = self.headers.get("Authorization")
        if self.fake.token and sent != f"Bearer {self.fake.token}":
            self._plain(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return False
        return True

    def _model_info(self, repo: str) -> None:
        if not self._allowed(repo):
            return
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "lfs": {"sha256": sha256(data), "size": len(data), "pointerSize": 130},
            }
            for name, data in self.fake.repos[repo].items()
        ]
        answer = {"id": repo, "modelId": repo, "sha": self.fake.commit, "siblings": siblings}
        answer |= {"tags": ["gguf", "license:apache-2.0"], "private": False, "downloads": 0}
        self._plain(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _resolve(self, path: str) -> None:
        repo, _, rest = path.strip("/").partition("/resolve/")
        name = rest.partition("/")[2]
        if not self._allowed(repo):
            return
        data = self.fake.repos[repo].get(name)
        if data is None:
            self._plain(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {
            "X-Repo-Commit": self.fake.commit,
            "X-Linked-Etag": f'"{sha256(data)}"',
            "X-Linked-Size": str(len(data)),
            "ETag": f'"{sha256(data)}"',
        }
        if self.fake.elsewhere is not None:
            place = f"/blob/{sha256(data)}"
            self.fake.elsewhere.files[place] = data
            self._plain(302, b"", {**headers, "Location": self.fake.elsewhere.url + place})
        else:
            self._file(path, data, headers)

    def _file(self, path: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        queue = self.fake.faults[path]
        fault = queue.popleft() if queue and self.command == "GET" else Fault("none")
        if fault.kind in ("status", "redirect"):
            place = {"Location": fault.url} if fault.url else {}
            self._plain(fault.status or 302, b"<html>no", {**fault.headers, **place})
            return
        if fault.kind == "other":
            data = fault.data
        headers = dict(headers or {})
        if self.fake.etags:
            headers.setdefault("ETag", f'"{sha256(data)[:20]}"')
        start = 0
        wanted = self.headers.get("Range")
        current = self.headers.get("If-Range", headers.get("ETag")) == headers.get("ETag")
        if wanted and current and fault.kind != "plain":
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(data):
                self._plain(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
            begin = start - 1 if fault.kind == "shifted" else start
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        body = data[start:]
        length = len(body) + (fault.after if fault.kind == "claim" else 0)
        if fault.kind == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        elif fault.kind != "endless":
            self.send_header("Content-Length", str(length))
        if fault.kind == "gzip":
            self.send_header("Content-Encoding", "gzip")
        for key, value in {**headers, **fault.headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault.kind == "chunked":
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
            return
        if fault.kind in ("cut", "stall"):
            body = body[: fault.after]
        for at in range(0, len(body), 1 << 16):
            self.wfile.write(body[at : at + (1 << 16)])
            if self.fake.pace:
                self.wfile.flush()
                time.sleep(self.fake.pace)
        if fault.kind == "stall":
            self.wfile.flush()
            time.sleep(1.5)
        if fault.kind != "none":
            self.close_connection = True
