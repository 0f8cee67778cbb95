"""A double of the Hugging Face Hub over real HTTP, for the real huggingface_hub client.

    with HubDouble() as hub:                 # serves on hub.url; hub_environ(hub) is the client's environment
        hub.tokens["hf_read"] = "read"
        hub.fail(2, 503, "/commit/")         # the next two matching requests answer 503
        hub.fail(1, child.kill, "/commit/", skip=1)    # in the middle of the second one, a process is killed
        hub.repos["model", "me/name"].files()

It keeps repositories with whole histories, takes regular and LFS files, resolves any commit, refuses a commit whose
parent is not the newest (412), knows tokens by role, gated repositories, and Jobs. It stores what a client sends and
says what the Hub says; it has no Xet, so clients need HF_HUB_DISABLE_XET=1.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_write"
KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
Request = Callable[[str, str], bool]


@dataclass
class Commit:
    sha: str
    message: str
    tree: dict[str, bytes]  # path -> content
    lfs: frozenset[str]  # paths stored as LFS objects


@dataclass
class Repo:
    private: bool = False
    gated: bool = False
    commits: list[Commit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.add("initial commit", {})

    def add(self, message: str, changes: dict[str, bytes | None], lfs: set[str] | None = None) -> Commit:
        """A new commit on top of the newest; None as content deletes a path, or a folder when it ends in /."""
        tree = dict(self.commits[-1].tree) if self.commits else {}
        kept = set(self.commits[-1].lfs) if self.commits else set()
        for path, content in changes.items():
            if content is None:
                for old in [p for p in tree if p == path or (path.endswith("/") and p.startswith(path))]:
                    del tree[old]
            else:
                tree[path] = content
                kept.discard(path)
        parent = self.commits[-1].sha if self.commits else ""
        digest = hashlib.sha1(f"{parent}{message}{time.time_ns()}".encode())
        commit = Commit(digest.hexdigest(), message, tree, frozenset((kept | (lfs or set())) & set(tree)))
        self.commits.append(commit)
        return commit

    def at(self, revision: str) -> Commit | None:
        if revision == "main":
            return self.commits[-1]
        return next((c for c in self.commits if c.sha == revision), None)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return dict(self.at(revision).tree)


@dataclass
class Fault:
    """The next `times` requests whose "METHOD /path" matches `pattern` answer `status`, or break the connection; before
    them `skip` matching ones pass."""

    times: int
    status: int | str | Callable[[], object]
    pattern: str
    headers: dict[str, str] = field(default_factory=dict)
    skip: int = 0

    def meets(self, request: str) -> bool:
        if self.times <= 0 or not re.search(self.pattern, request):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


class HubDouble:
    def __init__(self, host: str = "127.0.0.1", port: int = 0):
        self.repos: dict[tuple[str, str], Repo] = {}
        self.tokens = {TOKEN: "write"}
        self.user = "me"
        self.orgs: list[str] = []  # that the user belongs to
        self.job_rights = True
        self.rights: dict[str, Any] | None = None  # what whoami says of a fine-grained token
        self.lfs_store: dict[str, bytes] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.on_job: list[Callable[[str, dict[str, Any]], None]] = []  # called with each new job's id and record
        self.on_end: list[Callable[[str], None]] = []  # called when a job is cancelled
        self.requests: list[str] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        self.server = ThreadingHTTPServer((host, port), type("Handler", (HubHandler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://{host}:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> HubDouble:
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def repo(self, name: str, kind: str = "model", **options: Any) -> Repo:
        """The repository, made when it does not exist."""
        return self.repos.setdefault((kind, name), Repo(**options))

    def fail(self, times: int, status: int | str | Callable[[], object], pattern: str, skip: int = 0,
             **headers: str) -> Fault:
        """`status` is an HTTP status, "reset" (before the answer), "cut" (in the middle of the request's body),
        "truncated" (in the middle of the answer's), or what is called when the request has arrived, before a reset."""
        self.faults.append(Fault(times, status, pattern, {k.replace("_", "-"): v for k, v in headers.items()}, skip))
        return self.faults[-1]

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, request)) for request in self.requests)


def hub_environ(hub: HubDouble, home: Any, token: str | None = TOKEN) -> dict[str, str]:
    """Environment of a client of `hub`; huggingface_hub reads it when it is imported."""
    environ = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_HOME": str(home),
               "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1"}
    return environ | ({"HF_TOKEN": token} if token else {})


class HttpError(Exception):
    def __init__(self, status: int, message: str, code: str = ""):
        self.status, self.message, self.code = status, message, code


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubDouble

    def log_message(self, *_: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, BrokenPipeError):
            self.close_connection = True

    def do_GET(self) -> None:
        self.answer()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    # -- plumbing ----------------------------------------------------------------------------------------------
    def answer(self) -> None:
        url = urlsplit(self.path)
        path, self.query = unquote(url.path), parse_qs(url.query)
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {path}")
            fault = next((f for f in self.hub.faults if f.meets(f"{self.command} {path}")), None)
        length = int(self.headers.get("Content-Length") or 0)
        if fault and fault.status == "cut":
            self.rfile.read(length // 2)
            return self.reset()
        chunked = self.headers.get("Transfer-Encoding") == "chunked"
        self.body = self.read_chunked() if chunked else self.rfile.read(length)
        if fault and callable(fault.status):
            fault.status()
        if fault and (fault.status == "reset" or callable(fault.status)):
            return self.reset()
        self.truncate = bool(fault) and fault.status == "truncated"
        if fault and not self.truncate:
            return self.send(fault.status, {"error": f"injected {fault.status}"}, fault.headers)
        try:
            with self.hub.lock:
                self.route(path)
        except HttpError as err:
            self.send(err.status, {"error": err.message}, {"X-Error-Code": err.code, "X-Error-Message": err.message})

    def read_chunked(self) -> bytes:
        parts = []
        while size := int(self.rfile.readline().strip() or b"0", 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def reset(self) -> None:
        """Ends the connection with RST: the client sees "connection reset by peer"."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True
        raise ConnectionResetError

    def send(self, status: int | str, payload: Any, headers: dict[str, str] | None = None) -> None:
        body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        self.send_response(int(status))
        for name, value in (headers or {}).items():
            if value:
                self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.truncate:
            self.wfile.write(body[:len(body) // 2])
            self.reset()
        self.wfile.write(body)

    def json(self) -> dict[str, Any]:
        return json.loads(self.body or b"{}")

    def role(self) -> str | None:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        return self.hub.tokens.get(token) if scheme == "Bearer" else None

    def owners(self) -> set[str]:
        """In whose name the user may write and run jobs."""
        return {self.hub.user, *self.hub.orgs}

    def find(self, kind: str, name: str, write: bool = False) -> Repo:
        repo, role = self.hub.repos.get((kind, name)), self.role()
        if repo is None or (repo.private and role is None):
            raise HttpError(404 if role else 401, "Repository not found", "RepoNotFound")
        if repo.gated and not write and re.search("/resolve/|/auth-check$", self.path):
            raise HttpError(403, f"Access to model {name} is restricted and you are not in the authorized list.",
                            "GatedRepo")
        if write and (role != "write" or name.split("/")[0] not in self.owners()):
            raise HttpError(403, f"You don't have write access to {name}")
        return repo

    def commit_of(self, repo: Repo, revision: str) -> Commit:
        commit = repo.at(revision)
        if commit is None:
            raise HttpError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    # -- routes ------------------------------------------------------------------------------------------------
    def route(self, path: str) -> None:
        if self.headers.get("Authorization") and self.role() is None:
            raise HttpError(401, "Invalid credentials in Authorization header")
        for pattern, method in ROUTES:
            if match := re.fullmatch(pattern, path):
                return getattr(self, method)(**match.groupdict())
        raise HttpError(404, f"the double knows no {self.command} {path}")

    def whoami(self) -> None:
        if self.role() is None:
            raise HttpError(401, "Invalid username or password.")
        token = {"displayName": "t", "role": self.role()}
        if self.hub.rights is not None:
            token |= {"role": "fineGrained", "fineGrained": self.hub.rights}
        self.send(200, {"type": "user", "name": self.hub.user, "orgs": [{"name": org} for org in self.hub.orgs],
                        "auth": {"type": "access_token", "accessToken": token}})

    def create(self) -> None:
        wanted = self.json()
        name = f"{wanted.get('organization') or self.hub.user}/{wanted['name']}"
        if self.role() != "write" or name.split("/")[0] not in self.owners():
            raise HttpError(403, f"You don't have the rights to create {name}")
        key = (wanted.get("type") or "model", name)
        if key in self.hub.repos:
            return self.send(409, {"error": "You already created this repo", "url": f"{self.hub.url}/{name}"})
        self.hub.repo(name, key[0], private=wanted.get("private") or wanted.get("visibility") == "private")
        self.send(200, {"url": f"{self.hub.url}/{name}", "name": name})

    def validate_yaml(self) -> None:
        """The client asks this about every README.md that it uploads."""
        errors, warnings = card_problems(self.json()["content"])
        self.send(400 if errors else 200, {"errors": [{"message": text} for text in errors],
                                           "warnings": [{"message": text} for text in warnings]})

    def auth_check(self, kinds: str, name: str, write: str | None) -> None:
        self.find(KINDS[kinds], name, write=bool(write))
        self.send(200, {})

    def info(self, kinds: str, name: str, revision: str | None) -> None:
        repo = self.find(KINDS[kinds], name)
        commit = self.commit_of(repo, revision or "main")
        self.send(200, {"id": name, "sha": commit.sha, "private": repo.private, "gated": repo.gated and "manual",
                        "tags": [], "downloads": 0, "likes": 0,
                        "siblings": [{"rfilename": p} for p in commit.tree]})

    def preupload(self, kinds: str, name: str, revision: str) -> None:
        there = self.commit_of(self.find(KINDS[kinds], name, write=True), revision)
        answers = []
        for file in self.json()["files"]:
            path, content = file["path"], there.tree.get(file["path"])
            mode = "lfs" if file["size"] > 5_000 or path.endswith((".safetensors", ".pt", ".pth")) else "regular"
            oid = None if content is None else (hashlib.sha256(content).hexdigest() if path in there.lfs else
                               hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest())
            answers.append({"path": path, "shouldIgnore": False, "oid": oid, "uploadMode": mode})
        self.send(200, {"files": answers})

    def lfs_batch(self, name: str, kinds: str | None = None) -> None:
        self.find(KINDS[kinds or "models"], name, write=True)
        objects = []
        for wanted in self.json()["objects"]:
            known = wanted["oid"] in self.hub.lfs_store
            href = {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}
            objects.append(wanted | ({} if known else {"actions": {"upload": href}}))
        self.send(200, {"transfer": "basic", "objects": objects})

    def lfs_put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HttpError(400, "the body is not the object of that oid")
        self.hub.lfs_store[oid] = self.body
        self.send(200, {})

    def commit(self, kinds: str, name: str, revision: str) -> None:
        repo = self.find(KINDS[kinds], name, write=True)
        changes, lfs, header = {}, set(), {}
        for line in self.body.decode().splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                header = value
            elif item["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.hub.lfs_store:
                    raise HttpError(400, f"LFS object of {value['path']} was not uploaded")
                changes[value["path"]] = self.hub.lfs_store[value["oid"]]
                lfs.add(value["path"])
            else:
                changes[value["path"] + ("/" if item["key"] == "deletedFolder" else "")] = None
        if header.get("parentCommit") and header["parentCommit"] != repo.commits[-1].sha:
            raise HttpError(412, "A commit has happened since. Please refresh and try again.")
        made = repo.add(header["summary"], changes, lfs)
        url = f"{self.hub.url}/{name}/commit/{made.sha}"
        self.send(200, {"success": True, "commitOid": made.sha, "commitUrl": url})

    def tree(self, kinds: str, name: str, revision: str, path: str | None) -> None:
        commit = self.commit_of(self.find(KINDS[kinds], name), revision)
        below = f"{path}/" if path else ""
        entries: dict[str, dict[str, Any]] = {}
        for file, content in commit.tree.items():
            if not file.startswith(below):
                continue
            parts = file.split("/")
            for depth in range(below.count("/") + 1, len(parts)):
                folder = "/".join(parts[:depth])
                entries[folder] = {"type": "directory", "path": folder, "oid": "0" * 40}
            sha = hashlib.sha256(content).hexdigest()
            entries[file] = {"type": "file", "path": file, "size": len(content), "oid": sha[:40]} | (
                {"lfs": {"oid": sha, "size": len(content), "pointerSize": 134}} if file in commit.lfs else {})
        if path and not entries:
            raise HttpError(404, f"{path} does not exist", "EntryNotFound")
        if self.query.get("recursive", [""])[0].lower() != "true":
            entries = {p: e for p, e in entries.items() if "/" not in p.removeprefix(below)}
        self.send(200, list(entries.values()))

    def resolve(self, name: str, revision: str, path: str, kinds: str | None = None) -> None:
        commit = self.commit_of(self.find(KINDS[kinds or "models"], name), revision)
        if path not in commit.tree:
            raise HttpError(404, f"Entry not found: {path}", "EntryNotFound")
        content = commit.tree[path]
        sha = hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{sha}"', "Accept-Ranges": "bytes"}
        if path in commit.lfs:
            headers |= {"X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(len(content))}
        start = int((re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "") or [0, 0])[1])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        headers["Content-Length"] = str(len(content) - start)
        self.send(206 if start else 200, content[start:], headers)

    # -- jobs --------------------------------------------------------------------------------------------------
    def jobs_of(self, namespace: str) -> None:
        if self.role() != "write" or namespace not in self.owners() or not self.hub.job_rights:
            raise HttpError(403, f"Missing permissions: job.write in {namespace}")
        if self.command == "GET":
            wanted = dict(label.partition("=")[::2] for label in self.query.get("label", []))
            stages = self.query.get("stage")
            return self.send(200, [self.shown(number) for number, job in self.hub.jobs.items()
                                   if job["owner"]["name"] == namespace and wanted.items() <= job["labels"].items()
                                   and (not stages or job["status"]["stage"] in stages)])
        spec = self.json()
        number = f"{len(self.hub.jobs) + 1:024x}"
        ports = spec.get("expose", {}).get("ports", [])
        self.hub.jobs[number] = {
            "id": number, "owner": {"id": "1", "name": namespace, "type": "user"},
            "status": {"stage": "RUNNING", "message": None,
                       "exposeUrls": [f"https://{number}--{port}.hf.jobs" for port in ports]},
            "createdAt": "2026-01-01T00:00:00.000Z", "dockerImage": spec.get("dockerImage"),
            "command": spec["command"], "arguments": [], "environment": spec["environment"],
            "flavor": spec["flavor"], "labels": spec.get("labels", {}), "spec": spec}
        for begin in self.hub.on_job:
            begin(number, self.hub.jobs[number])
        self.send(200, self.shown(number))

    def shown(self, number: str) -> dict[str, Any]:
        return {key: value for key, value in self.hub.jobs[number].items() if key != "spec"}

    def job(self, namespace: str, number: str, action: str | None) -> None:
        if number not in self.hub.jobs or self.hub.jobs[number]["owner"]["name"] != namespace:
            raise HttpError(404, "Job not found")
        if action == "cancel":
            self.hub.jobs[number]["status"]["stage"] = "CANCELED"
            for end in self.hub.on_end:
                end(number)
        self.send(200, self.shown(number))


def card_problems(content: str) -> tuple[list[str], list[str]]:
    """Errors and warnings about a model card's metadata, by the rules of the Hub's documentation of model cards."""
    block = re.match(r"\s*---\r?\n([\s\S]*?)\r?\n---\s*(\r?\n|$)", content)
    try:
        data = yaml.safe_load(block[1]) if block else None
    except yaml.YAMLError as err:
        return [f"bad YAML: {err}"], []
    if not data:
        return [], ["empty or missing yaml metadata in repo card"]
    if not isinstance(data, dict):
        return ["the metadata must be a mapping"], []
    errors = []
    for key in ("base_model", "datasets"):
        for value in data[key] if isinstance(data.get(key), list) else [data[key]] if key in data else []:
            if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(value)):
                errors.append(f'"{key}" with value "{value}" is not valid. Use an id from https://hf.co/{key}s.')
    if "license" in data and data["license"] not in ("apache-2.0", "mit", "other"):
        errors.append('"license" must be one of the known identifiers, or "other"')
    if data.get("license") == "other" and not re.fullmatch(r"[a-z0-9.-]+", str(data.get("license_name", ""))):
        errors.append('"license_name" must be a lowercase identifier when "license" is "other"')
    if "license_link" in data and not re.match(r"https?://|LICENSE", str(data["license_link"])):
        errors.append('"license_link" must be a URL or the name of the repo\'s licence file')
    if data.get("base_model_relation", "adapter") not in ("adapter", "merge", "quantized", "finetune"):
        errors.append('"base_model_relation" is not a known relation')
    errors += [f'"{key}" must be {kind.__name__}' for key, kind in (("tags", list), ("pipeline_tag", str),
               ("library_name", str), ("model-index", list)) if key in data and not isinstance(data[key], kind)]
    if any(not isinstance(tag, str) for tag in data.get("tags") or []):
        errors.append('"tags" must be strings')
    for model in data.get("model-index") or []:
        required = [(model, "name", "")]
        for i, result in enumerate(model.get("results") or []):
            at = f"results[{i}]."
            required += [(result.get("task") or {}, "type", at + "task."),
                         *((result.get("dataset") or {}, key, at + "dataset.") for key in ("type", "name")),
                         *((metric, key, at + "metrics.") for metric in result.get("metrics") or [{}]
                           for key in ("type", "value"))]
        errors += [f'"model-index[0].{at}{key}" is required' for where, key, at in required if key not in where]
    return errors, []


NAME = r"(?P<name>[^/]+/[^/]+)"
REPO = rf"/api/(?P<kinds>models|datasets|spaces)/{NAME}"
ROUTES = [
    (r"/api/whoami-v2", "whoami"),
    (r"/api/repos/create", "create"),
    (r"/api/validate-yaml", "validate_yaml"),
    (r"/api/jobs/(?P<namespace>[^/]+)", "jobs_of"),
    (r"/api/jobs/(?P<namespace>[^/]+)/(?P<number>[^/]+)(?:/(?P<action>cancel))?", "job"),
    (REPO + r"/auth-check(?P<write>/write)?", "auth_check"),
    (REPO + r"/preupload/(?P<revision>[^/]+)", "preupload"),
    (REPO + r"/commit/(?P<revision>[^/]+)", "commit"),
    (REPO + r"/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?", "tree"),
    (REPO + r"(?:/revision/(?P<revision>[^/]+))?", "info"),
    (rf"/(?:(?P<kinds>datasets)/)?{NAME}\.git/info/lfs/objects/batch", "lfs_batch"),
    (r"/lfs/(?P<oid>[0-9a-f]{64})", "lfs_put"),
    (rf"/(?:(?P<kinds>datasets)/)?{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
]


def running(hub: HubDouble) -> Iterator[str]:
    """Ids of the jobs of `hub` that have not ended."""
    return (number for number, job in hub.jobs.items() if job["status"]["stage"] == "RUNNING")
