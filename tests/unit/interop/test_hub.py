"""Models of the hub: resolved once to a commit, kept in the cache, and one line where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

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


class Hub(BaseHTTPRequestHandler):
    """The hub's answers for the model ``team/model``, as its client asks for them."""

    def __init__(self, asked: list[str], *rest: object) -> None:
        self.asked = asked
        super().__init__(*rest)  # type: ignore[arg-type]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.asked.append(self.path)
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
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, found))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield found, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


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
