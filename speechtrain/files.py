"""Safe reading and writing of files.

A file is written completely or not at all. A run directory may come from a stranger, so links in it are not
followed, and only regular files of a bounded size are read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import IO, Annotated, Any, cast

import yaml

from speechtrain.errors import FORMAT_CHARACTERS, MALFORMED, MachineError, escape_controls, print_notice

MOST_BYTES = 2**24
"""Limit for a file that is read at once, 16 MiB. The largest such file is the checkpoint.json of 1000 ranks
with 0.1 MB."""
MOST_LOG_BYTES = 2**28
"""Limit for a file of lines, 256 MiB, such as a metrics.jsonl with 600,000 events of 400 bytes."""

_TEMPORARY_NAME = re.compile(r"\..+\.[0-9a-f]{16}")  # the names that ``atomic`` uses: .NAME.16 random digits

FilePath = Annotated[str, "path"]
"""A parameter that names a file or folder. The config of a run stores its absolute path."""


def absolute_path(name: str | Path) -> Path:
    """Return an absolute path without ``~`` and ``..``.

    ``..`` is kept if removing it would lead to another file. This happens after a symbolic link: if
    ``a/link`` is a link to another folder, ``a/link/../b`` is not ``a/b``.
    """
    path = Path(os.path.expanduser(name)).absolute()  # Path.expanduser raises for an unknown user.
    short_path = Path(os.path.abspath(path))
    if not os.path.exists(path):
        return short_path
    is_same_file = os.path.exists(short_path) and short_path.samefile(path)
    return short_path if is_same_file else path


def stdout_problem(text: str = "") -> str:
    """Print ``text`` and flush stdout. Return the reason if stdout cannot be written, else an empty text.

    If stdout cannot be written, the null device replaces it, so that later prints do not fail.
    """
    try:
        print(text, end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return str(error.strerror)
    return ""


def flush(path: Path) -> None:
    """Wait until the operating system has written a file or folder to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_filled(path: Path, follow: bool = True) -> BufferedReader:
    """Open a regular file for reading if it is filled with data. Raises OSError as ``open_regular`` does.

    A file is not filled if it is sparse, above 1 GiB, and has data in at most 0.1 % of its size. Raises
    OSError for such a file. A small archive can unpack to terabytes of holes, and this project writes no
    sparse files.
    """
    file = open_regular(path, follow=follow)
    handle = file.fileno()
    size = os.fstat(handle).st_size
    data_bytes = 0
    position = 0
    with contextlib.suppress(OSError):  # lseek raises OSError after the last data.
        while position < size and data_bytes * 1000 <= size:
            data_start = os.lseek(handle, position, os.SEEK_DATA)
            position = os.lseek(handle, data_start, os.SEEK_HOLE)
            data_bytes += position - data_start
    file.seek(0)
    if size > 2**30 and data_bytes * 1000 <= size:
        file.close()
        raise OSError(errno.EINVAL, "it is almost empty, for its size", str(path))
    return file


def sha256(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal. Raises OSError as ``open_filled`` does."""
    with open_filled(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def apply_umask(path: Path) -> None:
    """Set the mode of a file to the mode of a new file under the user's umask.

    safetensors writes files that only their owner may read.
    """
    new_file = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    new_file.touch()
    shutil.copymode(new_file, path)
    new_file.unlink()


def open_regular(path: str | Path, limit: int | None = None, follow: bool = True) -> BufferedReader:
    """Open a regular file of at most ``limit`` bytes for reading.

    Raises OSError for a pipe, a device or a folder, and without ``follow`` also for a link. Raises ValueError
    for an impossible name, such as one with a null character.
    """
    flags = os.O_RDONLY if follow else os.O_RDONLY | os.O_NOFOLLOW
    return cast("BufferedReader", _open_checked(path, flags, "rb", limit))


def _open_checked(path: str | Path, flags: int, mode: str, limit: int | None = None) -> IO[bytes]:
    """Open a file with ``flags`` of ``os.open`` and ``mode`` of ``open``.

    Raises OSError unless it is a regular file of at most ``limit`` bytes. O_NONBLOCK prevents that opening a
    pipe waits for its writer.
    """
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "it is a link"
        raise
    status = os.fstat(handle)
    problem = ""
    if not stat.S_ISREG(status.st_mode):
        problem = "it is not a regular file"
    elif limit is not None and status.st_size > limit:
        problem = f"it has {status.st_size} bytes, the most are {limit}"
    if problem:
        os.close(handle)
        raise OSError(errno.EINVAL, problem, str(path))
    return os.fdopen(handle, mode)


def open_append(path: Path) -> IO[bytes]:
    """Open a regular file for appending and reading, and create it if it is missing.

    Raises OSError, also if ``path`` is a link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return _open_checked(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, "ab+")


def read_bytes(path: str | Path, limit: int = MOST_BYTES, follow: bool = False) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes. Raises as ``open_regular`` does."""
    with open_regular(path, limit, follow) as file:
        return file.read(limit)


def read_text(path: str | Path) -> str:
    """Return the UTF-8 text of a file, which must not be a link. Raises OSError or ValueError."""
    return read_bytes(path).decode()


YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # The loader of libyaml is twice as fast.
_MAX_YAML_BYTES, _MAX_YAML_NODES, _MAX_YAML_DEPTH = 2**20, 50_000, 50


def yaml_text(path: Path, follow: bool = True) -> str:
    """Return the text of a small YAML file. Raises as ``small_yaml`` does, and OSError."""
    return small_yaml(read_bytes(path, _MAX_YAML_BYTES, follow).decode())


def small_yaml(text: str) -> str:
    """Return ``text`` unchanged if it is YAML of limited size without aliases, else raise ValueError.

    Parsers are called with the result, as in ``yaml.safe_load(small_yaml(text))``.

    The limits are for the length of the text, its nodes and its levels. An alias could repeat a node very
    often, so it is refused. Each character of an interpolation counts as a node, because OmegaConf takes as
    long for it. Raises YAMLError for a text that is not YAML.
    """
    if len(text) > _MAX_YAML_BYTES:
        raise ValueError(f"it has {len(text)} characters, the most are {_MAX_YAML_BYTES}")
    nodes = depth = 0
    for event in yaml.parse(text, YAML_LOADER):
        nodes += 1
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it has the alias *{event.anchor}. Write the value in its place")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.ScalarEvent):
            nodes += _extra_nodes(event)
        if nodes > _MAX_YAML_NODES or depth > _MAX_YAML_DEPTH:
            limits = f"more than {_MAX_YAML_NODES} nodes, or more than {_MAX_YAML_DEPTH} levels"
            raise ValueError(f"it has {limits}")
    return text


def _extra_nodes(event: yaml.ScalarEvent) -> int:
    """Return the characters of an interpolation, else 0. Raises ValueError for a long number."""
    is_quoted_text = event.implicit[1]
    if not is_quoted_text and re.match(r"[-+]?\d[\dA-Fa-fxo_:]{999,}\Z", event.value):
        raise ValueError("it has a number of more than 1000 digits")  # Python prints at most 4300.
    return len(event.value) if "${" in event.value else 0


@contextlib.contextmanager
def writing(target: object, fix: str) -> Iterator[None]:
    """Return a context that turns an OSError into a MachineError with ``target``, the reason and the fix."""
    try:
        yield
    except OSError as error:
        raise MachineError(f"{target} cannot be written ({error.strerror or error}); {fix}") from error


@contextlib.contextmanager
def atomic(path: Path, durable: bool = True, private: bool = False) -> Iterator[Path]:
    """Return a context with the path of a new, empty file in the folder of ``path``.

    At the end of the block, the new file is renamed to ``path``, so a reader sees the old file or the new
    one, and never a part. If the block raises an error, the new file is removed. A missing folder is made
    first. If ``path`` is a link, the link is replaced.

    ``durable`` flushes the new file to the disk before the rename. With ``private``, only the owner may read
    it. Raises OSError if the disk is full or read-only.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    mode = 0o600 if private else 0o666
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode))
    try:
        yield temporary
        if durable:
            flush(temporary)
        temporary.replace(path)
    except OSError as error:
        if error.filename is None:  # An error of a write, such as a full disk, names no file.
            error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def remove_temporaries(folder: Path) -> None:
    """Remove the files that ``atomic`` left in ``folder`` when its process was killed.

    No other process may write in the folder at this time. A file that cannot be removed stays.
    """
    for path in folder.glob(".*"):
        if _TEMPORARY_NAME.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


def append_line(path: Path, line: bytes) -> None:
    """Append ``line`` and a line break in one write, so that lines of several processes are not mixed.

    If the file ends with an incomplete line, which a kill or a full disk leaves, a line break is added first.
    A missing folder is made. Raises OSError.
    """
    with open_append(path) as file:
        is_empty = file.seek(0, os.SEEK_END) == 0
        if not is_empty:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line + b"\n")


def write_text(path: Path, text: str, durable: bool = True, private: bool = False) -> None:
    """Write ``text`` to ``path``, with the arguments of ``atomic``.

    A surrogate, which UTF-8 cannot encode, is written as an escape.
    """
    with atomic(path, durable, private) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def _integer(digits: str) -> int:
    if len(digits) > 300:  # A float holds 308 digits, and Python refuses to print more than 4300.
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


parse_json = json.JSONDecoder(parse_int=_integer).decode
"""Parse a stranger's JSON. Raises ValueError or RecursionError."""


def log_lines(path: str | Path) -> Iterator[bytes]:
    """Yield the lines of a file. A line above ``MOST_BYTES`` is split. A missing file has no lines.

    Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError), open_regular(path, MOST_LOG_BYTES, follow=False) as file:
        yield from iter(lambda: file.readline(MOST_BYTES), b"")


def json_lines(lines: Iterable[bytes | str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in ``lines``. Other lines, such as an incomplete last one, are omitted."""
    for line in lines:
        with contextlib.suppress(*MALFORMED):
            text = line.decode() if isinstance(line, bytes) else line
            record = parse_json(text)
            if isinstance(record, dict):
                yield record


def with_finite_numbers(content: Any, default: Callable[[Any], Any] | None = None) -> Any:
    """Return ``content`` after a conversion to JSON and back, with None for infinities and NaN.

    ``default`` is the argument of ``json.dumps`` that converts other types.
    """
    return json.loads(json.dumps(content, default=default), parse_constant=lambda name: None)


def write_json(path: Path, content: Mapping[str, Any], durable: bool = True, private: bool = False) -> None:
    """Write ``content`` as JSON to ``path``, with the arguments of ``atomic``.

    A number that is not finite becomes null.
    """
    write_text(path, json.dumps(with_finite_numbers(content), indent=2) + "\n", durable, private)


def read_json(path: Path, follow: bool = False) -> dict[str, Any]:
    """Return the JSON mapping in ``path``.

    The result is empty if the file is missing, cannot be read, is not a mapping, or (without ``follow``) is a
    link.
    """
    try:
        content = parse_json(read_bytes(path, follow=follow).decode())
    except (OSError, *MALFORMED):
        return {}
    return content if isinstance(content, dict) else {}


def print_line(line: str) -> None:
    """Print a line on stdout. If stdout cannot be written, print it as a warning on stderr instead."""
    problem = stdout_problem(f"{line}\n")
    if problem:
        print_notice(f"warning: stdout: {problem}: {line}")


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row. The cells of a column are aligned, and an empty column is omitted."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width]
        lines.append("  ".join(cells).rstrip())
    return lines


def json_text(content: Any) -> str:
    """Return ``content`` as JSON on one line, with letters of all scripts unescaped.

    If the content has control characters, all characters beyond ASCII are escaped.
    """
    text = json.dumps(content, ensure_ascii=False)
    has_controls = text != escape_controls(text, FORMAT_CHARACTERS)
    return json.dumps(content) if has_controls else text


# Names of variables and keys whose values are secrets. TOKEN must not match TOKENIZER.
_SECRET_NAME = re.compile(
    r"(?i)TOKEN(?!IZER)|KEY|PASSW|PASSPHRASE|SECRET|CREDENTIAL|BEARER|JWT|COOKIE|DATABASE_URL"
    r"|(?:^|_)(?:PAT|AUTH|DSN)(?![A-Z])|_PWD(?![A-Z])"
)
# The group is a key in YAML, JSON or KEY=VALUE, whose value is neither null nor an interpolation.
# The lookbehind and the possessive ``++`` make the search linear in the length of a word.
_KEY_WITH_VALUE = re.compile(r"(?<!\w)(\w++)[\"']?[ \t]*[:=][ \t]*(?!null\b|[\"']?\$\{)(?=[^\s,}[{])")
_PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")


def is_secret(name: str) -> bool:
    """Return whether a variable with this name has a value that must not appear in a command line or log."""
    return _SECRET_NAME.search(name) is not None


def holds_secret(text: str) -> bool:
    """Return whether ``text`` contains a key with a secret name and a value, or a URL with a password."""
    has_secret_key = any(map(is_secret, _KEY_WITH_VALUE.findall(text)))
    return has_secret_key or _PASSWORD_IN_URL.search(text) is not None
