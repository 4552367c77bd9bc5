"""A stand-in for the hub on this machine: the parts of its HTTP API that uploads and downloads of models use.

Files are kept in memory, by commit. Large files come by Git LFS, with `HF_HUB_DISABLE_XET`, or by Xet, whose library
can store in a folder in place of a server. Answers are those that `huggingface_hub` reads.
"""

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = 1000  # bytes from which a file goes by LFS or Xet, but text
TOKEN = "hf_of_the_test"  # of the user `me`; writes are refused without it


@dataclass
class Repository:
    """A model repository: the files of every commit, and the commit of every branch."""

    private: bool = False
    gated: bool = False
    card: dict[str, Any] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], message: str = "") -> str:
        number = f"{len(self.commits) + 1:040x}"
        self.commits[number], self.branches[branch] = files, number
        self.messages.append(message)
        return number

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches.get(revision, revision)]


class Hub(ThreadingHTTPServer):
    """Repositories by id, stored objects by sha256, and what was asked for: `METHOD path`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.xet: dict[str, str] = {}  # Xet's hash of an object; the real hub reads it in what was uploaded
        self.xet_folder = ""
        self.asked: list[str] = []
        self.broken: dict[str, int] = {}  # answer a path that ends so with this status

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def make(self, name: str, files: dict[str, bytes] | None = None, **fields: Any) -> Repository:
        self.repositories[name] = Repository(**fields)
        self.repositories[name].commit("main", {".gitattributes": b"*.onnx filter=lfs\n"} | (files or {}))
        return self.repositories[name]


class Refusal(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        self.status, self.code = status, code
        super().__init__(message)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # which waits 40 ms between an answer's header and its content
    server: Hub

    def log_message(self, *_: object) -> None:
        """Nothing: the tests read stderr."""

    def do_HEAD(self) -> None:
        self._answer()

    do_GET = do_POST = do_PUT = do_HEAD

    def _answer(self) -> None:
        address = urlsplit(self.path)
        self.path, self.query = unquote(address.path), parse_qs(address.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(f"{self.command} {self.path}")
        try:
            for end, status in self.server.broken.items():
                if self.path.endswith(end):
                    raise Refusal(status, "out of order")
            for pattern, answer in ROUTES.items():
                if match := re.fullmatch(pattern, f"{self.command} {self.path}"):
                    return answer(self, *match.groups())
            raise Refusal(404, f"no route {self.command} {self.path}")
        except Refusal as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": str(refusal)}
            self._send(json.dumps({"error": str(refusal)}).encode(), refusal.status, headers)

    def _send(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, value: object, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), status)

    @property
    def authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, name: str, write: bool = False) -> Repository:
        repository = self.server.repositories.get(name)
        if repository is None or (repository.private and not self.authorized):
            raise Refusal(404, "Repository not found", "RepoNotFound")
        if repository.gated and not self.authorized:
            raise Refusal(403, f"Access to model {name} is restricted", "GatedRepo")
        if write and not (self.authorized and name.startswith("me/")):
            raise Refusal(403, "you have no write access")
        return repository

    def _files(self, name: str, revision: str) -> tuple[dict[str, bytes], str]:
        repository = self._repository(name)
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repository.commits[commit], commit

    # --- what is asked for ------------------------------------------------------------------------------------------

    def create(self) -> None:
        asked = json.loads(self.body)
        if not self.authorized:
            raise Refusal(401, "Invalid username or password.")
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        if not name.startswith("me/"):
            raise Refusal(
                403, f"You don't have the rights to create a model under the namespace {asked['organization']!r}"
            )
        there = name in self.server.repositories
        if not there:
            self.server.make(name, private=asked.get("visibility") == "private")
        self._json({"url": f"{self.server.endpoint}/{name}", "name": name}, 409 if there else 200)

    def info(self, name: str, revision: str | None = None) -> None:
        files, commit = self._files(name, revision or "main")
        repository = self.server.repositories[name]
        siblings = [{"rfilename": file} for file in sorted(files)]
        more = {"private": repository.private, "cardData": repository.card, "siblings": siblings}
        self._json({"id": name, "modelId": name, "sha": commit} | more)

    def branch(self, name: str, branch: str) -> None:
        repository = self._repository(name, write=True)
        there = branch in repository.branches
        if not there:
            repository.branches[branch] = repository.branches["main"]
        self._json({}, 409 if there else 201)

    def tree(self, name: str, revision: str) -> None:
        files, _ = self._files(name, revision)
        entries = []
        for file, content in sorted(files.items()):
            entry = {"type": "file", "path": file, "size": len(content), "oid": _blob(content)}
            if _is_large(file, len(content)):
                entry["lfs"] = {"oid": _sha256(content), "size": len(content), "pointerSize": 130}
                entry |= {"xetHash": self.server.xet[_sha256(content)]} if self.server.xet else {}
            entries.append(entry)
        self._json(entries)

    def preupload(self, name: str, revision: str) -> None:
        self._repository(name, write=True)
        files, _ = self._files(name, revision)
        modes = []
        for file in json.loads(self.body)["files"]:
            large, old = _is_large(file["path"], file["size"]), files.get(file["path"])
            oid = None if old is None else (_sha256(old) if large else _blob(old))
            mode = {
                "path": file["path"],
                "uploadMode": "lfs" if large else "regular",
                "shouldIgnore": False,
                "oid": oid,
            }
            modes.append(mode)
        self._json({"files": modes})

    def batch(self, name: str) -> None:
        self._repository(name, write=True)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            upload = {"upload": {"href": f"{self.server.endpoint}/objects/{wanted['oid']}"}}
            objects.append(wanted if wanted["oid"] in self.server.objects else wanted | {"actions": upload})
        self._json({"transfer": "basic", "objects": objects})

    def store(self, oid: str) -> None:
        assert _sha256(self.body) == oid
        self.server.objects[oid] = self.body
        self._json({})

    def xet_token(self, name: str, kind: str) -> None:
        self._repository(name, write=kind == "write")
        answer = {"casUrl": f"local://{self.server.xet_folder}", "accessToken": "x", "exp": 1 << 40}
        headers = {"X-Xet-Cas-Url": answer["casUrl"], "X-Xet-Access-Token": "x", "X-Xet-Token-Expiration": str(1 << 40)}
        self._send(json.dumps(answer).encode(), headers=headers)

    def commit(self, name: str, branch: str) -> None:
        repository = self._repository(name, write=True)
        files, message = dict(self._files(name, branch)[0]), ""
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            match line["key"]:
                case "header":
                    message = value["summary"]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.server.objects[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        number = repository.commit(branch, files, message)
        self._json({"commitUrl": f"{self.server.endpoint}/{name}/commit/{number}", "commitOid": number})

    def validate(self) -> None:
        assert json.loads(self.body)["content"].startswith("---\n")
        self._json({"errors": [], "warnings": []})

    def resolve(self, name: str, revision: str, file: str) -> None:
        files, commit = self._files(name, revision)
        if file not in files:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        content, headers = files[file], {"X-Repo-Commit": commit, "ETag": f'"{_sha256(files[file])}"'}
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if start is None:
            self._send(content, headers=headers)
        else:
            part = f"bytes {start[1]}-{len(content) - 1}/{len(content)}"
            self._send(content[int(start[1]) :], 206, headers | {"Content-Range": part})


ROUTES = {
    r"POST /api/repos/create": Handler.create,
    r"POST /api/validate-yaml": Handler.validate,
    r"GET /api/models/([^/]+/[^/]+)/tree/(.+)": Handler.tree,
    r"GET /api/models/([^/]+/[^/]+)/revision/(.+)": Handler.info,
    r"GET /api/models/([^/]+(?:/[^/]+)?)": Handler.info,
    r"POST /api/models/([^/]+/[^/]+)/branch/(.+)": Handler.branch,
    r"POST /api/models/([^/]+/[^/]+)/preupload/(.+)": Handler.preupload,
    r"POST /api/models/([^/]+/[^/]+)/commit/(.+)": Handler.commit,
    r"GET /api/models/([^/]+/[^/]+)/xet-(write|read)-token/.+": Handler.xet_token,
    r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch": Handler.batch,
    r"PUT /objects/(\w+)": Handler.store,
    r"(?:GET|HEAD) /([^/]+/[^/]+)/resolve/([^/]+)/(.+)": Handler.resolve,
}


def _is_large(name: str, size: int) -> bool:
    return size >= LARGE and not name.endswith((".md", ".json"))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _blob(content: bytes) -> str:
    """Git's name of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
