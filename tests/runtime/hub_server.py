"""A server on loopback that speaks as much of the Hub's HTTP API as uploads and downloads need."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


__all__ = ["HubServer"]

_LFS_FROM = 1 << 20  # bytes; smaller files are sent inside a commit


class HubServer(ThreadingHTTPServer):
    """Repositories in memory. Use as a context manager; `endpoint` is what HF_ENDPOINT should be.

    Attributes:
        repositories: content by path, by repository id.
        cards: what model info says beside the files (pipeline_tag, tags, ...), by repository id.
        uploaded, downloaded: paths in the order in which they were sent.
        ranges: paths and `Range` headers of partial downloads.
        cut: paths whose first download ends in the middle.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.cards: dict[str, dict[str, Any]] = {}
        self.objects: dict[str, bytes] = {}
        self.uploaded: list[str] = []
        self.downloaded: list[str] = []
        self.ranges: list[tuple[str, str]] = []
        self.cut: set[str] = set()
        self.created: list[dict[str, Any]] = []

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def commit_of(self, repository: str) -> str:
        content = self.repositories[repository]
        named = "".join(f"{name}{hashlib.sha1(content[name]).hexdigest()}" for name in sorted(content))
        return hashlib.sha1(named.encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quiet: the tests look at what was asked for."""

    # --- answers ---

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, content: Any, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), Content_Type="application/json")

    def _missing(self, code: str) -> None:
        self._send(404, b"{}", X_Error_Code=code, X_Error_Message=code)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    # --- requests ---

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path)
        tree = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = info or tree or file
        if not found:
            return self._missing("EntryNotFound")
        if found[1] not in self.server.repositories:
            return self._missing("RepoNotFound")
        content = self.server.repositories[found[1]]
        commit = self.server.commit_of(found[1])
        if found[2] not in (None, "main", commit):
            return self._missing("RevisionNotFound")
        if file:
            return self._file(found[1], found[3], content, commit)
        if tree:
            return self._json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in content.items()
                ]
            )
        return self._json(
            {
                "id": found[1],
                "modelId": found[1],
                "sha": commit,
                "private": False,
                "siblings": [{"rfilename": name} for name in content],
                "tags": [],
                **self.server.cards.get(found[1], {}),
            }
        )

    do_HEAD = do_GET

    def _file(self, repository: str, name: str, content: dict[str, bytes], commit: str) -> None:
        if name not in content:
            return self._send(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        data = content[name]
        headers = {
            "X_Repo_Commit": commit,
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "Accept_Ranges": "bytes",
        }
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        start, end = (int(asked[1]), int(asked[2] or len(data) - 1) + 1) if asked else (0, len(data))
        if self.command == "HEAD":
            return self._send(200, data, **headers)
        if asked and start >= len(data):
            return self._send(416)
        if asked:
            self.server.ranges.append((name, asked[0]))
            headers["Content_Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        else:
            self.server.downloaded.append(name)
        if name in self.server.cut:
            self.server.cut.remove(name)
            self.send_response(200)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.close_connection = True
            return None
        return self._send(206 if asked else 200, data[start:end], **headers)

    def do_PUT(self) -> None:
        name = self.path.rsplit("/", 1)[1]
        data = self._body()
        assert hashlib.sha256(data).hexdigest() == name
        self.server.objects[name] = data
        self._send(200)

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self._body()
        if self.headers.get("Authorization") != "Bearer hf_test":
            return self._send(401)
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            wanted = json.loads(body)
            repository = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            status = 409 if repository in self.server.repositories else 200
            self.server.repositories.setdefault(repository, {})
            self.server.created.append(wanted)
            return self._json({"url": f"{self.server.endpoint}/{repository}", "id": repository}, status)
        if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._json(
                {"transfer": "basic", "objects": list(map(self._upload, json.loads(body)["objects"]))}
            )
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] >= _LFS_FROM else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            return self._commit(found[1], [json.loads(line) for line in body.splitlines() if line])
        return self._missing("EntryNotFound")

    def _upload(self, wanted: dict[str, Any]) -> dict[str, Any]:
        href = f"{self.server.endpoint}/objects/{wanted['oid']}"
        return {"oid": wanted["oid"], "size": wanted["size"], "actions": {"upload": {"href": href}}}

    def _commit(self, repository: str, lines: list[dict[str, Any]]) -> None:
        content = self.server.repositories[repository]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                content[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                content[value["path"]] = self.server.objects[value["oid"]]
            else:
                continue
            self.server.uploaded.append(value["path"])
        commit = self.server.commit_of(repository)
        url = f"{self.server.endpoint}/{repository}/commit/{commit}"
        self._json({"success": True, "commitOid": commit, "commitUrl": url})
