"""Downloads from a real HTTP server: cut connections, ranges, checksums; archives that want out."""

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
    asked: list[tuple[str, str | None]]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        content = self.server.files.get(self.path)
        asked = self.headers.get("Range")
        self.server.asked.append((self.path, asked))
        if content is None:
            self.send_error(404)
            return
        begin = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.has_ranges else 0
        if asked and begin >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.end_headers()
            return
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(content) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(content[begin : begin + self.server.bytes_per_connection])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(downloads.time, "sleep", lambda seconds: None)
    with Server(("127.0.0.1", 0), Handler) as one:
        one.files, one.bytes_per_connection, one.has_ranges, one.asked = {}, 2**30, True, []
        thread = threading.Thread(target=functools.partial(one.serve_forever, poll_interval=0.01))
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def archive(*members: tuple[str, bytes] | tarfile.TarInfo, mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for member in members:
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member[0])
            content = b"" if isinstance(member, tarfile.TarInfo) else member[1]
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def described(content: bytes, **more: str) -> Archive:
    return Archive(["a"], 1e-6, 1e-6, md5=hashlib.md5(content, usedforsecurity=False).hexdigest(), **more)


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/"


NOISE = bytes(hashlib.sha256(str(i).encode()).digest()[0] for i in range(40_000))  # gzip keeps its size


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_download_that_is_cut_continues(
    server: Server, tmp_path: Path, has_ranges: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    content = archive(("Corpus/a/1.flac", NOISE), ("Corpus/a/1.txt", b"one"))
    server.files["/a.tar.gz"] = content
    (tmp_path / "a.tar.gz.part").write_bytes(content[:5_000])  # of a command that was killed
    server.has_ranges, server.bytes_per_connection = has_ranges, 20_000 if has_ranges else 2**30
    fetch(tmp_path, url(server), {"a.tar.gz": described(content)}, "Corpus")
    assert (tmp_path / "Corpus/a/1.flac").read_bytes() == NOISE
    assert (tmp_path / "Corpus/a/1.txt").read_text() == "one"
    ranges = [asked for _, asked in server.asked]
    assert ranges == (["bytes=5000-", "bytes=25000-"] if has_ranges else ["bytes=5000-"])
    told = capsys.readouterr().out
    assert "needs about 0 MB" in told.splitlines()[0]
    assert "a.tar: " not in told.splitlines()[0]
    before = len(server.asked)
    fetch(
        tmp_path, url(server), {"a.tar.gz": described(content)}, "Corpus"
    )  # done: nothing is asked or printed
    assert len(server.asked) == before
    assert not capsys.readouterr().out


def test_a_server_that_stays_silent_is_one_line_and_the_next_command_continues(
    server: Server, tmp_path: Path
) -> None:
    content = archive(("Corpus/a/1.flac", NOISE))
    server.files["/a.tar.gz"] = content
    server.bytes_per_connection = 0
    with pytest.raises(MachineError, match="same command continues"):
        fetch(tmp_path, url(server), {"a.tar.gz": described(content)}, "Corpus")
    assert len(server.asked) == 5
    server.bytes_per_connection = 2**30
    fetch(tmp_path, url(server), {"a.tar.gz": described(content)}, "Corpus")
    assert (tmp_path / "Corpus/a/1.flac").read_bytes() == NOISE


def test_a_complete_part_is_not_downloaded_again(server: Server, tmp_path: Path) -> None:
    content = archive(("Corpus/a/1.flac", NOISE))
    server.files["/a.tar.gz"] = content
    (tmp_path / "a.tar.gz.part").write_bytes(content)  # killed between the last byte and the new name
    fetch(tmp_path, url(server), {"a.tar.gz": described(content)}, "Corpus")
    assert (tmp_path / "Corpus/a/1.flac").read_bytes() == NOISE


def test_an_archive_by_hand_is_used_and_a_half_unpacked_folder_continues(
    server: Server, tmp_path: Path
) -> None:
    inner = archive(("S1/1.wav", NOISE), ("S1/2.wav", b"two"))
    content = archive(("data/wav/S1.tar.gz", inner), ("data/text.txt", b"one two"))
    (tmp_path / "a.tgz").write_bytes(content)
    (tmp_path / "in/data/wav/S1").mkdir(parents=True)
    (tmp_path / "in/data/wav/S1/1.wav").write_bytes(NOISE[:100])  # cut by a kill
    (tmp_path / "in/data/wav/S1/2.wav").write_bytes(b"TWO")  # complete: left alone
    fetch(
        tmp_path, url(server), {"a.tgz": described(content, into="in", inner="data/wav/*.tar.gz")}, "Corpus"
    )
    assert (tmp_path / "in/data/wav/S1/1.wav").read_bytes() == NOISE
    assert (tmp_path / "in/data/wav/S1/2.wav").read_bytes() == b"TWO"
    assert (tmp_path / "in/data/text.txt").read_text() == "one two"
    assert not server.asked


def test_a_wrong_checksum_and_a_missing_archive_are_one_line(server: Server, tmp_path: Path) -> None:
    content = archive(("a/1", b"one"))
    server.files["/a.tar.gz"] = content[:-1] + b"!"
    with pytest.raises(DataError, match=r"a\.tar\.gz: its md5 is \w+, published is \w+\. Delete it"):
        fetch(tmp_path, url(server), {"a.tar.gz": described(content)}, "Corpus")
    assert not (tmp_path / "a").exists()
    with pytest.raises(DataError, match="404"):
        fetch(tmp_path, url(server), {"b.tar.gz": described(content)}, "Corpus")
    server.files["/c.tar.gz"] = content[: len(content) // 2]
    with pytest.raises(DataError, match="cannot be unpacked"):
        fetch(tmp_path, url(server), {"c.tar.gz": Archive(["a"], 1e-6, 1e-6)}, "Corpus")


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def device(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = tarfile.CHRTYPE
    return info


@pytest.mark.parametrize(
    "members",
    [
        [("../out.txt", b"x")],
        [("a/../../out.txt", b"x")],
        [link("a", "../"), ("a/out.txt", b"x")],
        [link("a", "/etc"), ("a/out.txt", b"x")],
        [link("a", "../out.txt", tarfile.LNKTYPE)],
        [device("a")],
    ],
)
def test_an_archive_writes_nothing_outside_its_folder(
    server: Server, tmp_path: Path, members: list[tuple[str, bytes] | tarfile.TarInfo]
) -> None:
    server.files["/a.tar"] = content = archive(*members, mode="w:")
    root = tmp_path / "root"
    with pytest.raises(DataError, match="cannot be unpacked"):
        fetch(root, url(server), {"a.tar": described(content)}, "Corpus")
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def links_beyond_the_longest_path(target: str) -> list[tarfile.TarInfo]:
    """Links that realpath does not follow to their end (CVE-2025-4517, CVE-2025-4330)."""
    letters = "abcdefghijklmnop"
    members = []
    path = ""
    for letter in letters:
        folder = tarfile.TarInfo(f"{path}{'d' * 247}")
        folder.type = tarfile.DIRTYPE
        members += [folder, link(f"{path}{letter}", "d" * 247)]
        path += "d" * 247 + "/"
    end = "/".join(letters) + "/" + "l" * 254
    return [*members, link(end, "../" * len(letters)), link("escape", f"{end}/../{target}")]


def extended_header(size: int) -> bytes:
    header = bytearray(tarfile.TarInfo("x").tobuf(tarfile.USTAR_FORMAT))
    header[124:136] = b"\x80" + size.to_bytes(11, "big")
    header[156:157], header[148:156] = b"x", b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + b"1" * 10_240


ZEROS = ("zeros", b"\0" * 2**26)
BOMB = archive(ZEROS)
BOMBS = [(f"{number}.tar", BOMB) for number in range(3)]
LARGE = ("zeros", b"\0" * (2**27 + 2_000))
HARD_LINK = link("c", "a", tarfile.LNKTYPE)
HOSTILE = {
    "links beyond the longest path": archive(*links_beyond_the_longest_path("home"), ("escape/x", b"x")),
    "a file behind a link": archive(("data/1", b"1"), link("here", "data"), ("here/x", b"x")),
    "a hard link through a link": archive(link("a", "b"), ("b", b""), HARD_LINK),
    "a hard link to nothing": archive(link("l", "none", tarfile.LNKTYPE)),
    "a link down and up": archive(link("l", "a/../../x")),
    "a name of 2,000 folders": archive(("a/" * 2_000 + "b", b"x")),
    "an extended header of 2^60 bytes": extended_header(2**60),
    "an extended header of 400,000 bytes": extended_header(400_000) + b"1" * 400_000,
    "a file above the declared size": archive(LARGE),
    "archives that are above the declared size together": archive(*BOMBS),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_fetch_refuses_a_hostile_archive_in_one_line(server: Server, tmp_path: Path, content: bytes) -> None:
    home = tmp_path / "home"
    home.mkdir()
    server.files["/a.tar"] = content
    with pytest.raises(DataError, match="cannot be unpacked"):
        fetch(tmp_path / "root", url(server), {"a.tar": described(content, inner="*.tar")}, "Corpus")
    assert not [*home.iterdir()]


def test_fetch_replaces_no_file_of_the_root(server: Server, tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text("mine")
    (tmp_path / "Corpus").mkdir()
    (tmp_path / "Corpus/1").symlink_to("../.bashrc")
    server.files["/a.tar"] = content = archive((".bashrc", b"strange"), ("Corpus/1", b"one"))
    fetch(tmp_path, url(server), {"a.tar": described(content)}, "Corpus")
    assert (tmp_path / ".bashrc").read_text() == "mine"
    assert (tmp_path / "Corpus/.bashrc").read_text() == "strange"
    assert (tmp_path / "Corpus/1").read_text() == "one"


def test_fetch_unpacks_only_inner_archives_of_the_archive(server: Server, tmp_path: Path) -> None:
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads/x.tar").write_bytes(archive(("placed", b"x")))
    server.files["/a.tar"] = content = archive(("a", b"x"))
    for pattern in ("../downloads/*.tar", "/etc/*.tar", "**/" * 2_000 + "x"):
        fetch(tmp_path, url(server), {"a.tar": described(content, inner=pattern)}, "Corpus")
        (tmp_path / ".a.tar.unpacked").unlink()
    assert not (tmp_path / "downloads/placed").exists()


def test_fetch_stops_at_the_declared_size(server: Server, tmp_path: Path) -> None:
    server.files["/a.tar"] = b"\0" * (2**27 + 2_000)
    with pytest.raises(DataError, match="more than the declared size"):
        fetch(tmp_path, url(server), {"a.tar": Archive(["a"], 1e-6, 1e-6)}, "Corpus")


def test_fetch_leaves_a_server_that_sends_a_few_bytes_per_connection(server: Server, tmp_path: Path) -> None:
    content = archive(("Corpus/a", NOISE))
    server.files["/a.tar.gz"] = content
    server.bytes_per_connection = 1
    with pytest.raises(MachineError, match="the same command continues"):
        fetch(tmp_path, url(server), {"a.tar.gz": described(content)}, "Corpus")
    assert len(server.asked) == 5


def test_links_inside_the_folder_are_made(server: Server, tmp_path: Path) -> None:
    server.files["/a.tar"] = content = archive(
        ("data/sph/a.sph", NOISE), link("legacy/train/sph/a.sph", "../../../data/sph/a.sph"), mode="w:"
    )
    for _ in range(2):
        fetch(tmp_path, url(server), {"a.tar": described(content)}, "Corpus")
        assert (tmp_path / "Corpus/legacy/train/sph/a.sph").read_bytes() == NOISE
        (tmp_path / ".a.tar.unpacked").unlink()


def test_the_room_on_the_disk_is_checked_before_the_first_byte(server: Server, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"needs about 2000000\.0 GB, .* are free"):
        fetch(tmp_path, url(server), {"a.tar": Archive(["a"], 1e6, 1e6)}, "Corpus")
    assert not server.asked


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
        fetch(tmp_path, where, {name: Archive(["a"], 1.0, 1.0, into=into)}, "Corpus")
