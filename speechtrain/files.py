"""Files that are written whole or not at all, and reads that end.

A run directory may be a stranger's. Links in it are not followed, and only regular files of a bounded size
are read.
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
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import IO, Annotated, Any, cast

import yaml

from speechtrain.errors import MALFORMED, SPELLING, MachineError, escape_controls, print_notice

MOST_BYTES = 2**24
"""The limit for a file that is read whole. The largest one, checkpoint.json of 1000 ranks, has 0.1 MB."""
MOST_LOG_BYTES = 2**28
"""The limit for a file of lines, such as metrics.jsonl: 600,000 events of 400 bytes."""

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}")

FilePath = Annotated[str, "path"]
"""A parameter that names a file or folder. The config of a run stores its absolute path."""


def absolute_path(name: str | Path) -> Path:
    """Return an absolute path without ``~`` and ``..``.

    ``..`` is kept if the path without it leads elsewhere, because a link stands before it.
    """
    path = Path(os.path.expanduser(name)).absolute()  # Path.expanduser raises for an unknown user.
    short = Path(os.path.abspath(path))
    is_same = not os.path.exists(path) or (os.path.exists(short) and short.samefile(path))
    return short if is_same else path


def stdout_problem(text: str = "") -> str:
    """Print ``text`` and flush. Return why stdout cannot be written, or an empty text.

    If stdout cannot be written, it is replaced by the null device.
    """
    try:
        print(text, end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return str(error.strerror)
    return ""


def flush(path: Path) -> None:
    """Write the buffered bytes of a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_filled(path: Path) -> BufferedReader:
    """Open a regular file as ``open_regular`` does. Refuse a file above 1 GiB that is almost all holes.

    A small archive can make terabytes of holes, and this project writes no holes. Raises OSError.
    """
    file = open_regular(path)
    size = os.fstat(file.fileno()).st_size
    end = filled = 0
    with contextlib.suppress(OSError):  # lseek raises it behind the last content.
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
    """Return the digest of a file. Raises OSError as ``open_filled`` does."""
    with open_filled(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def apply_umask(path: Path) -> None:
    """Give a file the mode of a new one. safetensors writes files that only their owner may read."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    new.touch()
    shutil.copymode(new, path)
    new.unlink()


def open_regular(path: str | Path, limit: int | None = None, follow: bool = True) -> BufferedReader:
    """Open a regular file of at most ``limit`` bytes for reading.

    A pipe does not block, a device is not read, and without ``follow`` no link is followed. Raises OSError,
    and ValueError for a name that no file can have.
    """
    file = _regular(path, os.O_RDONLY | (0 if follow else os.O_NOFOLLOW), "rb", limit)
    return cast("BufferedReader", file)


def _regular(path: str | Path, flags: int, mode: str, limit: int | None = None) -> IO[bytes]:
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
    """Open a regular file, or a new one, to append and read. Raises OSError, for a link too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return _regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, "ab+")


def read_bytes(path: str | Path, limit: int = MOST_BYTES, follow: bool = False) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes. Raises as ``open_regular`` does."""
    with open_regular(path, limit, follow) as file:
        return file.read(limit)


def read_text(path: str | Path, errors: str = "strict") -> str:
    """Return the UTF-8 text of a file, which must not be a link. Raises OSError or ValueError."""
    return read_bytes(path).decode("utf-8", errors)


YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # The loader of libyaml is twice as fast.
_YAML_BYTES, _YAML_NODES, _YAML_DEPTH = 2**20, 50_000, 50


def yaml_text(path: Path, follow: bool = True) -> str:
    """Return the text of a small YAML file. Raises as ``small_yaml`` does, and OSError."""
    return small_yaml(read_bytes(path, _YAML_BYTES, follow).decode())


@dataclass
class _YamlNode:
    """The size of a node of a YAML text, or the size so far of a collection that is still open."""

    anchor: str | None = None
    nodes: int = 1
    depth: int = 0  # levels below it


def small_yaml(text: str) -> str:
    """Return ``text`` if it is small YAML, as a text and as the objects that it builds.

    An alias counts as all nodes that it repeats. Each character of an interpolation counts as a node, because
    OmegaConf parses both equally slowly. Raises ValueError, and YAMLError for a text that is not YAML.
    """
    if len(text) > _YAML_BYTES:
        raise ValueError(f"it has {len(text)} characters, the most are {_YAML_BYTES}")
    anchored_nodes: dict[str, _YamlNode] = {}
    open_nodes = [_YamlNode(nodes=0)]
    for event in yaml.parse(text, YAML_LOADER):
        if isinstance(event, yaml.CollectionEndEvent):
            node = open_nodes.pop()
        else:
            node = _node_of(event, anchored_nodes)
        parent = open_nodes[-1]
        parent.nodes += node.nodes
        parent.depth = max(parent.depth, node.depth + 1)
        if parent.nodes > _YAML_NODES or len(open_nodes) + node.depth > _YAML_DEPTH:
            raise ValueError(f"it has more than {_YAML_NODES} nodes, or more than {_YAML_DEPTH} levels")
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append(_YamlNode(node.anchor, nodes=0))
        elif node.anchor:
            anchored_nodes[node.anchor] = node
    return text


def _node_of(event: Any, anchored_nodes: Mapping[str, _YamlNode]) -> _YamlNode:
    """Return the node of an event that does not end a collection. Raises ValueError for a long number."""
    if isinstance(event, yaml.AliasEvent):
        # An open collection has no size yet. With an alias of itself, its depth has no limit.
        node = anchored_nodes.get(event.anchor, _YamlNode(depth=_YAML_DEPTH))
        return replace(node, anchor=None)
    node = _YamlNode(getattr(event, "anchor", None))
    if isinstance(event, yaml.ScalarEvent):
        if "${" in event.value:
            node.nodes += len(event.value)
        if not event.implicit[1] and re.match(r"[-+]?\d[\dA-Fa-fxo_:]{999,}\Z", event.value):
            raise ValueError("it has a number of more than 1000 digits")  # Python prints at most 4300.
    return node


_MOST_OBJECTS = 2**24  # objects in one object of a pickle, if each reference counts as a copy
_MOST_OPEN = 10**5  # objects on the stack of a pickle


class _PickleSizes:
    """The stack and the memo of a pickle, with the sizes of the objects in place of the objects."""

    def __init__(self) -> None:
        self._stack: list[int | None] = []  # None: a mark
        self._memo: dict[int, int] = {}

    def apply(self, operation: pickletools.OpcodeInfo, argument: Any) -> None:
        """Apply one operation of the pickle. Raises ValueError if an object is too large."""
        size = 1
        if operation.name.endswith("PUT"):
            size = int(argument)  # A large place in the memo is refused like a large object.
            self._memo[size] = (self._stack and self._stack[-1]) or 1
        elif operation.name == "MARK":
            self._stack.append(None)
        else:
            if operation.name.endswith("GET"):
                size += self._memo.get(int(argument), 0)
            size += self._pop_inputs(operation.stack_before)
            self._stack += [size] * len(operation.stack_after)
        if size > _MOST_OBJECTS or len(self._stack) > _MOST_OPEN:
            raise ValueError("its objects refer to each other too often")

    def _pop_inputs(self, inputs: list[pickletools.StackObject]) -> int:
        """Remove the inputs of an operation. Return the sum of their sizes."""
        size = 0
        if pickletools.markobject in inputs:
            while self._stack and self._stack[-1] is not None:
                size += self._pop()
            self._pop()
            inputs = inputs[: inputs.index(pickletools.markobject)]
        return size + sum(self._pop() for _ in inputs)

    def _pop(self) -> int:
        """Remove the top of the stack. Return its size, which is 0 for a mark and for an empty stack."""
        return (self._stack and self._stack.pop()) or 0


def names_in_pickle(file: IO[bytes]) -> set[str]:
    """Return the full names of the classes and functions in one pickle, in the spelling of Python 3.

    Raises ValueError for a bomb: objects that are small in the file, and large if each reference to another
    object is followed, as it is for the hash of a tuple.
    """
    names: set[str] = set()
    sizes = _PickleSizes()
    for operation, argument, _ in pickletools.genops(file):
        sizes.apply(operation, argument)
        if operation.name == "PROTO" and argument != 2:
            raise ValueError(f"its pickle protocol is {argument}, and torch.save writes 2")
        if operation.name == "GLOBAL":
            module, _, name = str(argument).partition(" ")
            in_python_3 = (IMPORT_MAPPING.get(module, module), name)
            names.add(".".join(NAME_MAPPING.get((module, name), in_python_3)))
    return names


def names_in_archive(path: Path, verify: bool = False) -> set[str]:
    """Return ``names_in_pickle`` of an archive of torch.save. ``verify`` also compares its checksums.

    Raises OSError for a file of holes, and BadZipFile for entries that torch.save does not write. The sizes
    are checked before an entry is read.
    """
    with open_filled(path) as file, zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        _check_layout(entries, os.fstat(file.fileno()).st_size)
        damaged_entry = archive.testzip() if verify else None
        if damaged_entry:
            raise zipfile.BadZipFile(f"the checksum of {damaged_entry} does not match")
        return names_in_pickle(archive.open(entries[0]))


def _check_layout(entries: list[zipfile.ZipInfo], end: int) -> None:
    """Raise BadZipFile unless entries are stored one after the other, and only the first is a ``data.pkl``.

    torch reads the ``data.pkl`` in the folder of the first entry, and it ignores the case of letters.
    ``end`` is the size of the file.
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
def writing(target: object, fix: str) -> Iterator[None]:
    """A context in which an OSError becomes a MachineError with ``target``, the reason and the fix."""
    try:
        yield
    except OSError as error:
        raise MachineError(f"{target} cannot be written ({error.strerror or error}); {fix}") from error


@contextlib.contextmanager
def atomic(path: Path, durable: bool = True, private: bool = False) -> Iterator[Path]:
    """A context with a new, empty file beside ``path``. It replaces ``path`` if the block raises no error.

    A reader sees the old file or the new one. A link is replaced, not followed. A missing folder is made
    first. An error removes the new file. ``durable`` flushes its bytes to the disk before the rename. With
    ``private``, only the owner may read it. Raises OSError if the disk is full or read-only.
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
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def remove_temporaries(folder: Path) -> None:
    """Remove the files that ``atomic`` left in ``folder`` when its process was killed.

    No other process may write in the folder at this time. A file that cannot be removed stays.
    """
    for path in folder.glob(".*"):
        if _TEMPORARY.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


def append_line(path: Path, line: bytes) -> None:
    """Append a line in one write, so that the lines of several processes are not mixed.

    A missing folder is made first. After an incomplete line, which a kill or a full disk leaves, the text
    starts on a new line. Raises OSError.
    """
    with open_append(path) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line + b"\n")


def write_text(path: Path, text: str, durable: bool = True, private: bool = False) -> None:
    """Replace ``path`` by ``text`` as ``atomic`` does. A character that UTF-8 lacks becomes an escape."""
    with atomic(path, durable, private) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def _integer(digits: str) -> int:
    if len(digits) > 300:  # A float holds 308 digits, and Python refuses to print more than 4300.
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


parse_json = json.JSONDecoder(parse_int=_integer).decode
"""Parse a stranger's JSON. Raises ValueError or RecursionError."""


def log_lines(path: str | Path) -> Iterator[bytes]:
    """Yield the lines of a file, long ones in parts. A missing file has no line. Raises OSError."""
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
    """Return ``content`` as JSON stores it, with None for infinities and NaN. ``default`` is json.dumps's."""
    return json.loads(json.dumps(content, default=default), parse_constant=lambda name: None)


def write_json(path: Path, content: Mapping[str, Any], durable: bool = True, private: bool = False) -> None:
    """Replace ``path`` by ``content`` as JSON, as ``atomic`` does. A number that is not finite is null."""
    write_text(path, json.dumps(with_finite_numbers(content), indent=2) + "\n", durable, private)


def read_json(path: Path, follow: bool = False) -> dict[str, Any]:
    """Return the mapping in ``path``, empty if the file is missing, unreadable, a link or not a mapping."""
    try:
        content = parse_json(read_bytes(path, follow=follow).decode())
    except (OSError, *MALFORMED):
        return {}
    return content if isinstance(content, dict) else {}


def print_line(line: str) -> None:
    """Print a line that no work depends on. If stdout cannot be written, a warning on stderr replaces it."""
    problem = stdout_problem(f"{line}\n")
    if problem:
        print_notice(f"warning: stdout: {problem}: {line}")


def json_text(content: Any) -> str:
    """Return JSON on one line, with the letters of all scripts. Control characters are escaped."""
    text = json.dumps(content, ensure_ascii=False)
    return text if text == escape_controls(text, SPELLING) else json.dumps(content)
