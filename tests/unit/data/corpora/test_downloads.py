"""Downloads from a real HTTP server: cut connections, ranges, checksums, sizes."""

from __future__ import annotations

import functools
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from speechtrain.data.corpora import downloads
from speechtrain.data.corpora.downloads import Archive, fetch
from speechtrain.errors import ConfigError, DataError, MachineError


class Server(ThreadingHTTPServer):
    """Serves ``files``; each connection ends after ``bytes_per_connection`` bytes."""

    files: dict[str, bytes]
    bytes_per_connection: int
    has_ranges: bool
    requests: list[str | None]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        content = self.server.files.get(self.path)
        requested = self.headers.get("Range")
        self.server.requests.append(requested)
        if content is None:
            self.send_error(404)
            return
        begin = int(requested.removeprefix("bytes=").rstrip("-")) if self.server.has_ranges else 0
        if self.server.has_ranges and begin >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.end_headers()
            return
        self.send_response(206 if self.server.has_ranges else 200)
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        self.wfile.write(content[begin : begin + self.server.bytes_per_connection])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(downloads, "_LEAST_BYTES", 10_000)  # The test's archives are small.
    with Server(("127.0.0.1", 0), Handler) as server:
        server.files, server.bytes_per_connection, server.has_ranges, server.requests = {}, 2**30, True, []
        thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.01))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def archive(*members: tuple[str, bytes] | tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member in members:
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member[0])
            content = b"" if isinstance(member, tarfile.TarInfo) else member[1]
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def described(content: bytes, **more: str) -> dict[str, Archive]:
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    return {"a.tar.gz": Archive(["a"], 1e-6, 1e-6, md5=md5, **more)}


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/"


NOISE = bytes(hashlib.sha256(str(i).encode()).digest()[0] for i in range(40_000))  # gzip keeps its size
CONTENT = archive(("Corpus/a/1.flac", NOISE), ("Corpus/a/1.txt", b"one"))


def test_a_download_that_is_cut_continues(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.files["/a.tar.gz"] = CONTENT
    (tmp_path / "a.tar.gz.part").write_bytes(CONTENT[:5_000])  # of a command that was killed
    server.bytes_per_connection = 20_000
    fetch(tmp_path, url(server), described(CONTENT))
    assert (tmp_path / "Corpus/a/1.flac").read_bytes() == NOISE
    assert (tmp_path / "Corpus/a/1.txt").read_text() == "one"
    assert server.requests == ["bytes=5000-", "bytes=25000-"]
    assert "needs about 0 MB" in capsys.readouterr().out.splitlines()[0]
    fetch(tmp_path, url(server), described(CONTENT))  # It is complete.
    assert len(server.requests) == 2
    assert not capsys.readouterr().out


def test_fetch_needs_no_ranges_of_the_server(server: Server, tmp_path: Path) -> None:
    server.files["/a.tar.gz"] = CONTENT
    server.has_ranges = False
    fetch(tmp_path, url(server), described(CONTENT))
    assert (tmp_path / "Corpus/a/1.flac").read_bytes() == NOISE


@pytest.mark.parametrize("bytes_per_connection", [0, 1])
def test_fetch_leaves_a_server_that_sends_little(
    server: Server, tmp_path: Path, bytes_per_connection: int
) -> None:
    server.files["/a.tar.gz"] = CONTENT
    server.bytes_per_connection = bytes_per_connection
    with pytest.raises(DataError, match="published is"):
        fetch(tmp_path, url(server), described(CONTENT))
    assert len(server.requests) == 1
    server.bytes_per_connection = 2**30
    fetch(tmp_path, url(server), described(CONTENT))
    assert (tmp_path / "Corpus/a/1.flac").read_bytes() == NOISE


def test_fetch_names_a_server_that_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="the same command continues the download"):
        fetch(tmp_path, "http://127.0.0.1:9", described(CONTENT))


def test_a_complete_part_is_not_downloaded_again(server: Server, tmp_path: Path) -> None:
    server.files["/a.tar.gz"] = CONTENT
    (tmp_path / "a.tar.gz.part").write_bytes(CONTENT)  # of a kill between the last byte and the new name
    fetch(tmp_path, url(server), described(CONTENT))
    assert (tmp_path / "Corpus/a/1.flac").read_bytes() == NOISE


def test_fetch_uses_an_archive_of_the_user(server: Server, tmp_path: Path) -> None:
    inner = archive(("S1/1.wav", NOISE), ("S1/2.wav", b"two"))
    content = archive(("data/wav/S1.tar.gz", inner), ("data/text.txt", b"one two"))
    (tmp_path / "a.tar.gz").write_bytes(content)
    (tmp_path / "in/data/wav/S1").mkdir(parents=True)
    (tmp_path / "in/data/wav/S1/1.wav").write_bytes(NOISE[:100])  # cut by a kill
    fetch(tmp_path, url(server), described(content, into="in", inner="data/wav/*.tar.gz"))
    assert (tmp_path / "in/data/wav/S1/1.wav").read_bytes() == NOISE
    assert (tmp_path / "in/data/wav/S1/2.wav").read_bytes() == b"two"
    assert (tmp_path / "in/data/text.txt").read_text() == "one two"
    assert not server.requests


def test_fetch_unpacks_nothing_with_another_checksum(server: Server, tmp_path: Path) -> None:
    server.files["/a.tar.gz"] = archive(("Corpus/a", b"other"))
    for _ in range(2):
        with pytest.raises(DataError, match=r"a\.tar\.gz.*: its md5 is \w+, published is \w+\. Try again"):
            fetch(tmp_path, url(server), described(CONTENT))
    assert not (tmp_path / "Corpus").exists()
    with pytest.raises(DataError, match="404"):
        fetch(tmp_path, url(server) + "mirror", described(CONTENT))
    with pytest.raises(ConfigError, match="it needs md5 or sha256"):
        fetch(tmp_path, url(server), {"a.tar.gz": Archive(["a"], 1e-6, 1e-6)})


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "members",
    [
        [("../out.txt", b"x")],
        [link("a", "../"), ("a/out.txt", b"x")],
        [link("a", "/etc"), ("a/out.txt", b"x")],
        [link("a", "../out.txt", tarfile.LNKTYPE)],
    ],
)
def test_an_archive_writes_nothing_outside_its_folder(
    server: Server, tmp_path: Path, members: list[tuple[str, bytes] | tarfile.TarInfo]
) -> None:
    server.files["/a.tar.gz"] = content = archive(*members)
    root = tmp_path / "root"
    with pytest.raises(DataError, match="cannot be unpacked"):
        fetch(root, url(server), described(content))
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_links_inside_the_folder_are_made(server: Server, tmp_path: Path) -> None:
    server.files["/a.tar.gz"] = content = archive(
        ("data/sph/a.sph", NOISE), link("legacy/train/sph/a.sph", "../../../data/sph/a.sph")
    )
    for _ in range(2):
        fetch(tmp_path, url(server), described(content))
        assert (tmp_path / "legacy/train/sph/a.sph").read_bytes() == NOISE
        (tmp_path / ".a.tar.gz.unpacked").unlink()


def test_fetch_stops_at_the_declared_size(server: Server, tmp_path: Path) -> None:
    server.files["/a.tar.gz"] = b"\0" * (2**27 + 2_000)
    with pytest.raises(DataError, match="more than the declared size"):
        fetch(tmp_path, url(server), described(CONTENT))
    assert (tmp_path / "a.tar.gz.part").stat().st_size <= 2**27 + 2_000


def test_the_room_on_the_disk_is_checked_before_the_first_byte(server: Server, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"needs about 2000000\.0 GB, .* are free"):
        fetch(tmp_path, url(server), {"a.tar": Archive(["a"], 1e6, 1e6, md5="0")})
    assert not server.requests


@pytest.mark.parametrize(
    ("name", "where", "into"),
    [
        ("a.tar", "file:///etc/", ""),
        ("a.tar", "ftp://h/", ""),
        ("../a.tar", "http://h", ""),
        ("a.tar", "http://h", ".."),
    ],
)
def test_a_config_cannot_send_a_download_elsewhere(tmp_path: Path, name: str, where: str, into: str) -> None:
    with pytest.raises(ConfigError):
        fetch(tmp_path, where, {name: Archive(["a"], 1.0, 1.0, md5="0", into=into)})
