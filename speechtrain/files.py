"""Files that are written whole or not at all, and reads that end.

A run directory may be a stranger's: its links are not followed, and what is read is regular and bounded.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pickletools
import re
import secrets
import shutil
import stat
import sys
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import IO, Annotated, Any, cast

import yaml

from speechtrain.errors import MALFORMED, SPELLING, MachineError, print_notice, printable

MOST_BYTES = 2**24  # of a file that is read whole: the largest, checkpoint.json of 1000 ranks, has 0.1 MB
MOST_LOG_BYTES = 2**28  # of a file of lines, such as metrics.jsonl: 600,000 events of 400 bytes

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}")

FilePath = Annotated[str, "path"]
"""A parameter that names a file or folder: a run's config holds it absolute, and so works from any folder."""


def whole_path(name: str | Path) -> Path:
    """``name`` absolute and without ``~`` and ``..``, which stays where a link before it leads elsewhere."""
    path = Path(os.path.expanduser(name)).absolute()  # Path's own raises for an unknown user
    short = Path(os.path.abspath(path))
    is_same = not os.path.exists(path) or (os.path.exists(short) and short.samefile(path))
    return short if is_same else path


def lost_output(text: str = "") -> str:
    """Print ``text`` and flush; returns why stdout cannot be written, which discards all from then on."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return str(error.strerror)
    return ""


def flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_filled(path: Path) -> BufferedReader:
    """Open a regular file as ``open_regular`` does, and refuse one above a GB that is almost all holes.

    A small archive makes terabytes of holes, and no writer of ours leaves any. Raises OSError.
    """
    file = open_regular(path)
    size = os.fstat(file.fileno()).st_size
    end = filled = 0
    with contextlib.suppress(OSError):  # there is no content behind the last hole
        while end < size and filled * 1000 <= size:
            begin = os.lseek(file.fileno(), end, os.SEEK_DATA)
            end = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
            filled += end - begin
    file.seek(0)
    if size > 2**30 and filled * 1000 <= size:
        file.close()
        raise OSError(errno.EINVAL, "it is almost empty, for its size", str(path))
    return file


def sha256(path: Path) -> str:
    """Return the digest of a file. Raises OSError as ``open_filled``."""
    with open_filled(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def follow_umask(path: Path) -> None:
    """Give a file the mode of a new one; safetensors writes files that only their owner may read."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    new.touch()
    shutil.copymode(new, path)
    new.unlink()


def open_regular(path: str | Path, limit: int | None = None, follow: bool = True) -> BufferedReader:
    """Open a regular file of at most ``limit`` bytes for reading.

    A pipe does not block, a device is not read, and without ``follow`` no link is followed. Raises OSError,
    ValueError for a name that no file can have.
    """
    file = _regular(path, os.O_RDONLY | (0 if follow else os.O_NOFOLLOW), "rb", limit)
    return cast("BufferedReader", file)


def _regular(path: str | Path, flags: int, mode: str, limit: int | None = None) -> IO[bytes]:
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        error.strerror = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise
    status = os.fstat(handle)
    problem = "it is not a regular file" if not stat.S_ISREG(status.st_mode) else ""
    if limit is not None and status.st_size > limit:
        problem = f"it has {status.st_size} bytes, the most are {limit}"
    if problem:
        os.close(handle)
        raise OSError(errno.EINVAL, problem, str(path))
    return os.fdopen(handle, mode)


def open_append(path: Path) -> IO[bytes]:
    """Open a regular file, or a new one, to append and read. Raises OSError, also for a link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return _regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, "ab+")


def read_bytes(path: str | Path, limit: int = MOST_BYTES, follow: bool = False) -> bytes:
    """The content of a regular file of at most ``limit`` bytes. Raises as ``open_regular``."""
    with open_regular(path, limit, follow) as file:
        return file.read(limit)


def read_text(path: str | Path, errors: str = "strict") -> str:
    """The UTF-8 text of a file of at most MOST_BYTES, through no link. Raises OSError, ValueError."""
    return read_bytes(path).decode("utf-8", errors)


YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is twice as fast
_YAML_BYTES, _YAML_NODES, _YAML_DEPTH = 2**20, 50_000, 50


def yaml_text(path: Path, follow: bool = True) -> str:
    """The text of a YAML file that is small, as ``small_yaml`` says. Raises as it, and OSError."""
    return small_yaml(read_bytes(path, _YAML_BYTES, follow).decode())


def small_yaml(text: str) -> str:
    """``text``, if it is small YAML as a text and as what it builds, where aliases repeat nodes.

    Each character of an interpolation counts as a node: parsing them is as slow.
    Raises ValueError, and YAMLError for a text that is no YAML.
    """
    if len(text) > _YAML_BYTES:
        raise ValueError(f"it has {len(text)} characters, the most are {_YAML_BYTES}")
    anchors: dict[str, tuple[int, int]] = {}
    nested: list[tuple[str | None, int, int]] = [(None, 0, 0)]  # anchor, nodes and depth of each open node
    for event in yaml.parse(text, YAML_LOADER):
        anchor, nodes, depth = getattr(event, "anchor", None), 1, 0
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, nodes, depth = nested.pop()
        elif isinstance(event, yaml.AliasEvent):  # one that is open still contains itself
            nodes, depth = anchors.get(str(anchor), (0, _YAML_DEPTH))
        elif isinstance(event, yaml.ScalarEvent):
            nodes += len(event.value) * ("${" in event.value)
            if not event.implicit[1] and re.match(r"[-+]?\d[\dA-Fa-fxo_:]{999,}\Z", event.value):
                raise ValueError("it has a number of more than 1000 digits")  # Python prints 4300
        outer, total, below = nested.pop()
        nested.append((outer, total + nodes, max(below, depth + 1)))
        if total + nodes > _YAML_NODES or len(nested) + depth > _YAML_DEPTH:
            raise ValueError(f"it has more than {_YAML_NODES} nodes, or more than {_YAML_DEPTH} levels")
        if isinstance(event, yaml.CollectionStartEvent):
            nested.append((anchor, 0, 0))
        elif anchor and not isinstance(event, yaml.AliasEvent):
            anchors[anchor] = nodes, depth
    return text


_MOST_OBJECTS, _MOST_OPEN = 2**24, 10**5  # of a pickle: each reference counted; not yet in another


def names_in_pickle(file: IO[bytes]) -> set[str]:
    """The full names of classes and functions in one pickle, in Python 3's spelling.

    Raises ValueError for a bomb: objects that are small in the file, and large where each reference to
    another is followed, as hashing a tuple does. ``stack`` holds their sizes instead of them, None a mark.
    """
    names, stack, memo = set(), list[int | None](), dict[int, int]()
    for operation, argument, _ in pickletools.genops(file):
        number = int(argument) if operation.name.endswith(("GET", "PUT")) else 0  # type: ignore[arg-type]
        size = 1 + (memo.get(number, 0) if "GET" in operation.name else 0)
        if "PUT" in operation.name:
            memo[number] = (stack and stack[-1]) or 1
            size = number
        elif operation.name == "MARK":
            stack.append(None)
        else:
            taken = operation.stack_before
            if pickletools.markobject in taken:
                while stack and (part := stack.pop()) is not None:
                    size += part
                taken = taken[: taken.index(pickletools.markobject)]
            size += sum((stack and stack.pop()) or 0 for _ in taken)
            stack += [size] * len(operation.stack_after)
        if size > _MOST_OBJECTS or len(stack) > _MOST_OPEN:
            raise ValueError("its objects refer to each other too often")
        if operation.name == "PROTO" and argument != 2:
            raise ValueError(f"its pickle protocol is {argument}, and torch.save writes 2")
        if operation.name == "GLOBAL":
            module, _, name = str(argument).partition(" ")
            in_python_3 = (IMPORT_MAPPING.get(module, module), name)
            names.add(".".join(NAME_MAPPING.get((module, name), in_python_3)))
    return names


def names_in_archive(path: Path, verify: bool = False) -> set[str]:
    """As ``names_in_pickle``, for an archive that torch.save wrote. ``verify`` checks its checksums, too.

    Raises OSError for a file of holes, and BadZipFile for entries that torch.save does not write. The sizes
    are checked before an entry is read.
    """
    with open_filled(path) as file, zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        _check_layout(entries, os.fstat(file.fileno()).st_size)
        if verify and (damaged := archive.testzip()):
            raise zipfile.BadZipFile(f"the checksum of {damaged} does not match")
        return names_in_pickle(archive.open(entries[0]))


def _check_layout(entries: list[zipfile.ZipInfo], end: int) -> None:
    """Raise BadZipFile unless stored entries follow one another, and the first alone is a ``data.pkl``.

    torch reads the ``data.pkl`` in the folder of the first entry, and it ignores the case of letters.
    """
    names = [entry.filename for entry in entries]
    pickles = [name for name in names if name.lower().endswith("data.pkl")]
    if pickles != names[:1] or not re.fullmatch(r"[^/]+/data\.pkl", "".join(pickles)):
        raise zipfile.BadZipFile("its first entry is not its only data.pkl")
    for entry in sorted(entries, key=lambda entry: entry.header_offset, reverse=True):
        size = entry.file_size
        if entry.compress_type or size != entry.compress_size or entry.header_offset + size > end:
            raise zipfile.BadZipFile("its entries are compressed or overlap, which torch.save never does")
        end = entry.header_offset


@contextlib.contextmanager
def writing(what: object, fix: str) -> Iterator[None]:
    """A context in which an OSError becomes a MachineError: ``what`` cannot be written, why, and the fix."""
    try:
        yield
    except OSError as error:
        raise MachineError(f"{what} cannot be written ({error.strerror or error}); {fix}") from error


@contextlib.contextmanager
def atomic(path: Path, durable: bool = True, private: bool = False) -> Iterator[Path]:
    """A new, empty file in the folder of ``path``; it replaces ``path`` if the block ends without an error.

    A reader sees the old file or the new one. A link is replaced, not followed. A missing folder is made
    first. An error removes the temporary. ``durable`` flushes its bytes to the disk before the rename;
    with ``private``, only the owner may read it. Raises OSError if the disk is full or read-only.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600 if private else 0o666))
    try:
        yield temporary
        if durable:
            flush(temporary)
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def remove_temporaries(folder: Path) -> None:
    """Remove what killed processes left of ``atomic`` in ``folder``, where no other process may write now.

    What cannot be removed stays.
    """
    for path in folder.glob(".*"):
        if _TEMPORARY.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


def append_line(path: Path, line: bytes) -> None:
    """Append a line, in one write: lines of several processes stay apart. A missing folder is made first.

    After an incomplete line (killed process, full disk), it starts on a new line. Raises OSError.
    """
    with open_append(path) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line + b"\n")


def write_text(path: Path, text: str, durable: bool = True, private: bool = False) -> None:
    """Replace ``path`` by ``text`` as ``atomic`` does; what UTF-8 cannot encode becomes an escape."""
    with atomic(path, durable, private) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def _integer(digits: str) -> int:
    if len(digits) > 300:  # a float holds 308, and Python refuses to print 4300
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


json_of = json.JSONDecoder(parse_int=_integer).decode
"""A stranger's JSON. Raises ValueError, RecursionError."""


def log_lines(path: str | Path) -> Iterator[bytes]:
    """The lines of a file, above MOST_BYTES in parts; a missing file has none. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), open_regular(path, MOST_LOG_BYTES, follow=False) as file:
        yield from iter(lambda: file.readline(MOST_BYTES), b"")


def json_lines(lines: Iterable[bytes | str]) -> Iterator[dict[str, Any]]:
    """The JSON objects in ``lines``; a line that is none, as an incomplete one after a kill, is left out."""
    for line in lines:
        with contextlib.suppress(*MALFORMED):
            text = line.decode() if isinstance(line, bytes) else line
            if isinstance(record := json_of(text), dict):
                yield record


def finite(content: Any, default: Callable[[Any], Any] | None = None) -> Any:
    """``content`` as JSON gives it back, None for infinities and NaN; ``default`` as in ``json.dumps``."""
    return json.loads(json.dumps(content, default=default), parse_constant=lambda name: None)


def write_json(path: Path, content: Mapping[str, Any], durable: bool = True, private: bool = False) -> None:
    """Replace ``path`` by ``content`` as JSON, in one step as ``atomic`` does; what is not finite is null."""
    write_text(path, json.dumps(finite(content), indent=2) + "\n", durable, private)


def read_json(path: Path, follow: bool = False) -> dict[str, Any]:
    """The mapping in ``path``; empty if the file is missing, unreadable, a link or not a mapping."""
    try:
        content = json_of(read_bytes(path, follow=follow).decode())
    except (OSError, *MALFORMED):
        return {}
    return content if isinstance(content, dict) else {}


def say(line: str) -> None:
    """Print a line that no work depends on. If stdout cannot be written, a warning on stderr replaces it."""
    if cause := lost_output(f"{line}\n"):
        print_notice(f"warning: stdout: {cause}; {line}")


def json_text(content: Any) -> str:
    """Return JSON on one line, with the letters of all scripts. Control characters are escaped."""
    text = json.dumps(content, ensure_ascii=False)
    return text if text == printable(text, SPELLING) else json.dumps(content)
