"""torch.save files read without running anything that they name.

A pickle is a program: loading one calls what it names. Here a name is only ever one of a few
harmless builders of this module or an ``Inert`` stand-in that keeps what it is given; nothing is
imported. Tensors stay in the file until they are asked for, so optimizer states cost nothing.
"""

from __future__ import annotations

import math
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from speechtrain.errors import DataError

_MAGIC = 0x1950A86A20F9469CFC6C  # begins files of torch before 1.6
_BROKEN = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    struct.error,
    EOFError,
    OSError,
    MemoryError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    IndexError,
    RecursionError,
    OverflowError,
    RuntimeError,
)

_STORAGES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
# of the standard library: names that settings and meters are made of. They become stand-ins too; all
# others of the standard library and of torch are refused, because no checkpoint has a use for them
_STANDARD = {
    "argparse": {"Namespace"},
    "collections": {"OrderedDict", "defaultdict", "deque", "Counter"},
    "enum": {"Enum", "IntEnum"},
    "typing": {"Any", "Union", "Optional", "List", "Dict", "Tuple"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath"},
    "datetime": {"datetime", "date", "time", "timedelta", "timezone"},
    "operator": {"getitem"},  # makes typing.List[int] of its parts
    "_operator": {"getitem"},
    "copyreg": {"_reconstructor", "__newobj__"},
    "_codecs": {"encode"},
    "builtins": {"object", "dict", "list", "tuple", "set", "frozenset", "str", "bytes", "bytearray"}
    | {"int", "float", "bool", "complex", "slice", "range"}
    | {"long", "unicode", "basestring", "xrange"},  # as protocol 2 spells them
}
_STANDARD["copy_reg"], _STANDARD["__builtin__"] = _STANDARD["copyreg"], _STANDARD["builtins"]
_TORCH = {"Size", "device", "Tensor", "Parameter"}


class Inert:
    """Stands in for an object of a class that is not loaded: keeps its arguments, items and state."""

    __slots__ = ("__dict__", "arguments", "items")  # the dictionary holds the object's own state only
    arguments: tuple[Any, ...]
    items: list[Any]
    module = name = ""

    def __new__(cls, *arguments: Any, **named: Any) -> Inert:
        made = super().__new__(cls)
        made.arguments, made.items = arguments, []
        return made

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):  # (attributes, slots)
            if isinstance(part, dict):
                vars(self).update({str(k): v for k, v in part.items()})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        self.items.append(value)

    def extend(self, values: Any) -> None:
        self.items.extend(values)

    add = append


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    read: Callable[[], bytes]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is still in its file."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self) -> Tensor:
        """The tensor. Raises RuntimeError or ValueError where the file does not hold all of it."""
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.storage.dtype)
        flat = torch.frombuffer(bytearray(self.storage.read()), dtype=self.storage.dtype)
        if math.prod(self.shape) > flat.numel():
            raise ValueError("a tensor larger than its storage")
        return flat.as_strided(self.shape, self.stride, self.offset).clone()


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    numbers = (offset, *shape, *stride)
    if not isinstance(storage, _Storage) or not all(type(n) is int and n >= 0 for n in numbers):
        raise pickle.UnpicklingError("a tensor without a storage")
    return StoredTensor(storage, offset, tuple(shape), tuple(stride))


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _from_type(builder: Any, _: Any, arguments: Any, state: Any) -> Any:
    if builder not in (_tensor, _parameter):
        raise pickle.UnpicklingError("a tensor of an unknown kind")
    return builder(*arguments)


_BUILDERS: dict[str, Callable[..., Any]] = {
    "_rebuild_tensor": _tensor,
    "_rebuild_tensor_v2": _tensor,
    "_rebuild_parameter": _parameter,
    "_rebuild_parameter_with_state": _parameter,
    "_rebuild_from_type_v2": _from_type,
}


class _Refused(Exception):
    """A name that no checkpoint needs."""


class _Unpickler(pickle.Unpickler):
    """Answers every name itself; ``storage`` finds a tensor's bytes by its key."""

    def __init__(self, file: IO[bytes], storage: Callable[[str, torch.dtype, int], _Storage]) -> None:
        super().__init__(file, encoding="utf-8")
        self._storage = storage
        self._classes: dict[tuple[str, str], type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        root = module.partition(".")[0]
        if root == "torch":
            return self._of_torch(module, name)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        is_standard = root in sys.stdlib_module_names or root in _STANDARD
        if is_standard and name not in _STANDARD.get(module, ()):
            raise _Refused(f"{module}.{name}")
        return self._inert(module, name)

    def _of_torch(self, module: str, name: str) -> Any:
        if name in _STORAGES:
            return _STORAGES[name]
        if name in _BUILDERS and module in ("torch._utils", "torch._tensor"):
            return _BUILDERS[name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if name in _TORCH:
            return self._inert(module, name)
        raise _Refused(f"{module}.{name}")

    def _inert(self, module: str, name: str) -> type[Inert]:
        key = (module, name)
        if key not in self._classes:
            self._classes[key] = type("Inert", (Inert,), {"module": module, "name": name})
        return self._classes[key]

    def persistent_load(self, saved: Any) -> _Storage:
        kind, dtype, key, _, values, *view = saved
        if kind != "storage" or not isinstance(dtype, torch.dtype) or any(part is not None for part in view):
            raise pickle.UnpicklingError("an object that torch.save does not write")
        return self._storage(str(key), dtype, int(values))


def read_pickle(path: Path) -> Any:
    """What ``torch.save`` wrote to ``path``, in its zip form or the one before torch 1.6.

    Tensors are ``StoredTensor``; objects of classes outside the standard containers are ``Inert``.
    Raises DataError: for a name that no checkpoint needs (nothing has run then), and for a file
    that is damaged or of another kind.
    """
    try:
        with path.open("rb") as file:
            start = file.read(4)
        if start == b"PK\x03\x04":
            return _read_zip(path)
        if start[:1] == b"\x80":
            return _read_legacy(path)
    except _Refused as refused:
        raise DataError(
            f"{path} is refused: it names {refused}, which no checkpoint needs; nothing of it was run. "
            "Take the file from a source that you trust"
        ) from None
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except _BROKEN as error:
        told = " ".join(str(error).split())[:120]
        raise DataError(
            f"{path} cannot be read as a torch checkpoint ({type(error).__name__}: {told}); fetch it again"
        ) from None
    raise DataError(f"{path} is no torch checkpoint; give the file that fairseq or Hugging Face wrote")


def _read_zip(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        main = next((name for name in names if name.endswith("data.pkl")), None)
        if main is None:
            raise ValueError("no data.pkl in the archive")
        prefix = main.removesuffix("data.pkl")
        if f"{prefix}byteorder" in names and archive.read(f"{prefix}byteorder") != sys.byteorder.encode():
            raise ValueError("the file's byte order is not this machine's")

        def storage(key: str, dtype: torch.dtype, values: int) -> _Storage:
            def read() -> bytes:
                with zipfile.ZipFile(path) as again:
                    return again.read(f"{prefix}data/{key}")

            return _Storage(dtype, read)

        with archive.open(main) as file:
            return _Unpickler(file, storage).load()


def _read_legacy(path: Path) -> Any:
    places: dict[str, tuple[int, int]] = {}
    sizes: dict[str, int] = {}

    def storage(key: str, dtype: torch.dtype, values: int) -> _Storage:
        sizes[key] = torch.empty((), dtype=dtype).element_size()

        def read() -> bytes:
            begin, length = places[key]
            with path.open("rb") as again:
                again.seek(begin)
                content = again.read(length)
            if len(content) < length:
                raise EOFError("the file ends inside a tensor")
            return content

        return _Storage(dtype, read)

    with path.open("rb") as file:

        def one() -> Any:
            return _Unpickler(file, storage).load()

        if one() != _MAGIC:
            raise ValueError("not written by torch.save")
        one()  # version of the protocol
        system = one()
        if isinstance(system, dict) and system.get("little_endian", True) != (sys.byteorder == "little"):
            raise ValueError("the file's byte order is not this machine's")
        content = one()
        for key in one():
            (values,) = struct.unpack("<q", file.read(8))
            places[str(key)] = (file.tell(), values * sizes[str(key)])
            file.seek(values * sizes[str(key)], 1)
    return content


def tensor_of(stored: StoredTensor, path: Path) -> Tensor:
    """Read a tensor. Raises DataError where the file does not hold all of it."""
    try:
        return stored.read()
    except _BROKEN as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}); fetch it again") from None


def plain(value: Any) -> Any:
    """Settings as dictionaries, lists and numbers, whatever kept them: namespaces, OmegaConf, enums.

    Raises DataError for settings that contain themselves.
    """
    try:
        return _plain(value)
    except RecursionError:
        raise DataError("the checkpoint's settings contain themselves") from None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(k) if isinstance(k, Inert) else k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if not isinstance(value, Inert):
        return value
    state = vars(value)
    if value.module.startswith("omegaconf"):  # nodes also point to their parents
        return _plain(state["_val"] if "_val" in state else state.get("_content"))
    kept = {k: _plain(v) for k, v in state.items() if k[:1] != "_"}
    if not kept and len(value.arguments) == 1:  # an enum's member, by its value
        return _plain(value.arguments[0])
    return kept
