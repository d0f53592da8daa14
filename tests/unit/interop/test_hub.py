"""Models of the hub: resolved once to a commit, kept in the cache, and one line where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TRIED = """
from speechtrain.errors import DataError
try:
    folder_of("hf:{}")
except DataError as error:
    print(error)
"""
FILES = {
    "config.json": b'{"model_type": "parakeet_ctc"}',
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"a pickle",
    "README.md": b"not needed",
}


class Handler(BaseHTTPRequestHandler):
    """A hub that notes its requests."""

    def __init__(self, requests: Any, *arguments: object) -> None:
        self.requests = requests
        super().__init__(*arguments)  # type: ignore[arg-type]

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(handler: type[Handler], requests: Any) -> Iterator[str]:
    """Serve a hub on this machine. Yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, requests))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class Hub(Handler):
    """The hub's answers for the model ``team/model``, as its client asks for them."""

    def do_GET(self) -> None:
        self.requests.append(self.path)
        path = self.path.partition("?")[0]
        if path in (f"/api/models/team/model/revision/{name}" for name in ("main", COMMIT)):
            siblings = [{"rfilename": name} for name in FILES]
            self.answer(json.dumps({"id": "team/model", "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith((f"/team/model/resolve/{COMMIT}/", "/team/model/resolve/main/")):
            self.answer(FILES[path.rpartition("/")[2]])
        elif "/tree/" in path:
            self.answer(
                json.dumps(
                    [{"type": "file", "path": n, "size": len(c), "oid": "0" * 40} for n, c in FILES.items()]
                ).encode()
            )
        else:
            self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, content: bytes, status: int = 200, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {
            "Content-Length": str(len(content)),
            "ETag": f'"{hash(content) & 0xFFFF}"',
            "X-Repo-Commit": COMMIT,
        }
        for name, value in {**headers, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture
def asked() -> Iterator[tuple[list[str], str]]:
    """A hub on this machine: what it was asked for, and its address."""
    found: list[str] = []
    with served(Hub, found) as endpoint:
        yield found, endpoint


def run(code: str, cache: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own: the library reads the variables when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    command = [sys.executable, "-c", f"from speechtrain.interop.hub import *\n{code}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_name_is_resolved_to_a_commit_and_needs_no_network_again(
    asked: tuple[list[str], str], tmp_path: Path
) -> None:
    requests, endpoint = asked
    done = run("print(pinned('hf:team/model'))", tmp_path, endpoint)
    assert done.stdout == f"hf:team/model@{COMMIT}\n", done.stderr
    assert not any("safetensors" in path for path in requests if "/resolve/" in path)
    code = f"print(*sorted(p.name for p in folder_of('hf:team/model@{COMMIT}').iterdir()))"
    assert run(code, tmp_path, endpoint).stdout == "config.json model.safetensors\n"
    closed = "http://127.0.0.1:9"  # the discard port: nobody answers
    offline = run(code, tmp_path, closed)
    assert offline.stdout == "config.json model.safetensors\n", offline.stderr


@pytest.mark.parametrize("name", ["team/other", "no such folder", "../up", "a/b/c"])
def test_what_is_not_there_is_one_line(name: str, asked: tuple[list[str], str], tmp_path: Path) -> None:
    done = run(TRIED.format(name), tmp_path, asked[1])
    assert done.stdout.startswith(f"hf:{name}: neither a folder nor a model that the hub gives"), done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_without_a_network_it_is_one_line(tmp_path: Path) -> None:
    done = run(TRIED.format("team/model"), tmp_path, "http://127.0.0.1:9")
    assert "copy the model to a folder" in done.stdout, done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_a_folder_is_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from speechtrain.interop.hub import folder_of, pinned

    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert pinned("hf:model") == f"hf:{tmp_path / 'model'}"
    assert folder_of("hf:model") == tmp_path / "model"


class UploadHub(Handler):
    """The hub's answers to an upload. It refuses a card without a licence."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.requests[self.path.partition("?")[0]] = body
        self.requests["token"] = self.headers["Authorization"]
        url = f"http://{self.headers['Host']}/team/model"
        status, answer = 200, json.dumps({"url": url})
        if self.path == "/api/validate-yaml" and "license" not in json.loads(body)["content"]:
            status, answer = 400, "license is missing"
        elif "/preupload/" in self.path:
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            answer = json.dumps({"files": [{**file, "shouldIgnore": False} for file in files]})
        elif "/commit/" in self.path:
            answer = json.dumps({"commitUrl": f"{url}/commit/{COMMIT}", "commitOid": COMMIT})
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())


@pytest.fixture
def upload_hub() -> Iterator[tuple[dict[str, str], str]]:
    """A hub on this machine for uploads: the bodies of its requests by path, and its address."""
    requests: dict[str, str] = {}
    with served(UploadHub, requests) as endpoint:
        yield requests, endpoint


UPLOAD = """
import os
os.environ["HF_TOKEN"] = "hf_secret"
from speechtrain.errors import SpeechtrainError
try:
    check_upload("team/model", needs_token=True)
    print(upload(Path({!r}), ["README.md", "config.json"], "team/model"))
except SpeechtrainError as error:
    print(error.exit_code, error)
"""


def test_upload_sends_the_named_files_after_the_hub_has_checked_the_card(
    upload_hub: tuple[dict[str, str], str], tmp_path: Path
) -> None:
    requests, endpoint = upload_hub
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "notes.txt"):
        (folder / name).write_text("{}")
    (folder / "README.md").write_text("---\nlicense: mit\n---\ntext\n")
    process = run(UPLOAD.format(str(folder)), tmp_path, endpoint)
    assert process.stdout == f"{endpoint}/team/model/commit/{COMMIT}\n", process.stderr
    lines = [json.loads(line) for line in requests["/api/models/team/model/commit/main"].splitlines()]
    assert {line["value"]["path"] for line in lines if line["key"] == "file"} == {"README.md", "config.json"}
    repository = json.loads(requests["/api/repos/create"])
    assert (repository["name"], repository["organization"]) == ("model", "team")
    assert repository.get("private") or repository.get("visibility") == "private"
    assert requests["token"] == "Bearer hf_secret"


def test_upload_stores_nothing_if_the_hub_refuses_the_card(
    upload_hub: tuple[dict[str, str], str], tmp_path: Path
) -> None:
    requests, endpoint = upload_hub
    (tmp_path / "README.md").write_text("---\ntags: [a]\n---\ntext\n")
    process = run(UPLOAD.format(str(tmp_path)), tmp_path, endpoint)
    assert process.stdout.startswith("4 --push team/model: the hub did not store the model"), process.stderr
    assert "license is missing" in process.stdout
    assert set(requests) == {"/api/validate-yaml", "token"}


def test_upload_without_a_network_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\ntext\n")
    process = run(UPLOAD.format(str(tmp_path)), tmp_path, "http://127.0.0.1:9")
    assert len(process.stdout.splitlines()) == 1, process.stderr
    assert "Repeat the command with --force" in process.stdout
    assert "hf_secret" not in process.stdout


@pytest.mark.parametrize(
    "name", ["", "a/b/c", "../x", "team/a b", "team/x.git", "datasets/a/b", "alone", "-a/b"]
)
def test_check_upload_refuses_a_name(name: str) -> None:
    from speechtrain.errors import ConfigError
    from speechtrain.interop.hub import check_upload

    with pytest.raises(ConfigError, match=f"--push {name}"):
        check_upload(name, needs_token=False)
