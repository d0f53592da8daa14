"""Read the torch.save files of other projects, without running their code.

A pickle names the classes and functions that build its objects, and a malicious file can name any. So a file
is read only if all its names are harmless. ``torch.load(weights_only=True)`` builds the tensors. Each object
of another class, for example of fairseq or OmegaConf, becomes an ``Inert`` object, so that these packages are
not imported.
"""

from __future__ import annotations

import os
import pickletools
import re
import sys
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from speechtrain.errors import DataError, one_line
from speechtrain.files import open_filled

# The harmless names of the standard library and of torch: the types of settings and of meters (running means
# of metrics), and dense tensors and their dtypes. Other names of the standard library and of torch are
# refused, even names that torch allows (sparse and quantised tensors). Names of other packages become
# ``Inert``.
_HARMLESS_NAMES = re.compile(
    r"argparse\.Namespace|enum\.(Int)?Enum|_?operator\.getitem|copyreg\.(_reconstructor|__newobj__)"
    r"|collections\.(OrderedDict|defaultdict|deque|Counter)|typing\.(Any|Union|Optional|List|Dict|Tuple)"
    r"|pathlib\.(Pure)?(Posix|Windows)?Path|datetime\.(datetime|date|time|timedelta|timezone)|_codecs\.encode"
    r"|builtins\.(object|dict|list|tuple|(frozen)?set|str|basestring|bytes|bytearray|int|float|bool|complex"
    r"|slice|range)"
    r"|torch\.((Float|Half|BFloat16|Double|Long|Int|Short|Char|Byte|Bool)Storage|Size|device|Tensor"
    r"|(bfloat|u?int|float|complex)\d+|bool|nn\.parameter\.Parameter|_tensor\._rebuild_from_type_v2"
    r"|_utils\._rebuild_(tensor(_v2)?|parameter(_with_state)?))"
)
_MAX_SETTINGS = 2**17
_MAX_OBJECT_SIZE = 2**24  # objects that one object of a pickle contains, if each reference counts as a copy
_MAX_STACK = 10**5  # objects on the stack of a pickle


class Inert:
    """Replaces an object of a class that is not imported.

    ``arguments`` are the arguments of the object's constructor. ``vars()`` returns the object's attributes.
    """

    __slots__ = ("__dict__", "arguments")  # With a slot, ``arguments`` is not among the object's attributes.
    arguments: tuple[Any, ...]
    name = ""  # the name of the replaced class. Each has its own subclass.

    def __new__(cls, *arguments: Any) -> Inert:
        inert = super().__new__(cls)
        inert.arguments = arguments
        return inert

    def __setstate__(self, state: Any) -> None:
        # A pickled state is a dictionary of attributes, or a tuple of this dictionary and one of slots.
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                for name, attribute in part.items():
                    vars(self)[str(name)] = attribute


def read_pickle(path: Path) -> Any:
    """Return the object in a file of ``torch.save``, in the zip format or in the format before torch 1.6.

    Tensors of a zip file are mapped into memory and read when they are used. A file of the older format is
    read completely. Objects of classes outside the standard containers are ``Inert``.

    Raises DataError if the file contains a name that no checkpoint needs. Its code has not run then. Raises
    DataError also if the file is damaged or of another kind.
    """
    try:
        with open_filled(path) as file:
            is_zip = file.read(4) == b"PK\x03\x04"
            file.seek(0)
            # An older file has five pickles: magic number, version, system, content, keys of the storages.
            pickles = _pickles_in_archive(file) if is_zip else [file] * 5
            names = set().union(*map(_names_in_pickle, pickles))
        refused = sorted([name for name in names if not _is_harmless(name)])
        # For refused names, DataError is raised after the ``try``, which would replace its message.
        if not refused:
            with torch.serialization.safe_globals([(_replacement(name), name) for name in names]):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except Exception as error:  # A damaged file makes the readers raise errors of many types.
        # torch puts advice before the cause and on the lines after it.
        _, _, cause = str(error).rpartition("WeightsUnpickler error: ")
        first_line, _, _ = cause.strip().partition("\n")
        reason = one_line(first_line, 120)
        raise DataError(
            f"{path} cannot be read as a torch checkpoint ({type(error).__name__}: {reason}). Give the file "
            "that fairseq or Hugging Face wrote, or download it again"
        ) from None
    raise DataError(
        f"{path} is refused: it names {one_line(refused[0], 120)}, which no checkpoint needs, and "
        "none of its code was run. Use a file from a source that you trust"
    )


def _pickles_in_archive(file: IO[bytes]) -> list[IO[bytes]]:
    """Return the pickles in a zip file, after a check of the sizes and checksums, which torch.load does not.

    torch.load reads one of them.
    """
    archive = zipfile.ZipFile(file)
    entries = archive.infolist()
    if sum(entry.file_size for entry in entries) > os.fstat(file.fileno()).st_size:
        raise zipfile.BadZipFile("its entries are compressed or overlap, which torch.save never does")
    damaged_entry = archive.testzip()
    if damaged_entry:
        raise zipfile.BadZipFile(f"the checksum of {damaged_entry} does not match")
    # torch.load ignores the case of letters in the name.
    return [archive.open(entry) for entry in entries if entry.filename.lower().endswith("data.pkl")]


class _PickleSizes:
    """Simulates the stack and the memo of a pickle. They contain the sizes of the objects.

    The size of an object is 1 plus the sizes of the objects that it contains.
    """

    def __init__(self) -> None:
        self._stack: list[int | None] = []  # None is a mark, which separates the inputs of an operation.
        self._memo: dict[int, int] = {}  # sizes by the number of the memo's entry

    def apply(self, operation: pickletools.OpcodeInfo, argument: Any) -> None:
        """Apply one operation of the pickle. Raises ValueError if an object or the stack is too large."""
        size = 1
        if operation.name.endswith("PUT"):
            entry = int(argument)
            top_size = self._stack[-1] if self._stack else None
            self._memo[entry] = top_size or 1  # A malformed pickle can have no object or a mark at the top.
            size = entry  # A too large number of an entry is refused below, like a too large object.
        elif operation.name == "MARK":
            self._stack.append(None)
        else:
            if operation.name.endswith("GET"):
                size += self._memo.get(int(argument), 0)
            size += self._pop_inputs(operation.stack_before)
            self._stack += [size] * len(operation.stack_after)
        if size > _MAX_OBJECT_SIZE or len(self._stack) > _MAX_STACK:
            raise ValueError("its objects refer to each other too often")

    def _pop_inputs(self, inputs: list[pickletools.StackObject]) -> int:
        """Remove the inputs of an operation from the stack. Return the sum of their sizes.

        If ``inputs`` has a mark, all objects above the topmost mark are inputs.
        """
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


def _names_in_pickle(file: IO[bytes]) -> set[str]:
    """Return the full names of the classes and functions in one pickle. Names of Python 2 are translated.

    Raises ValueError if an object contains too many others when each reference counts as a copy. Such an
    object is small in the file, but a function that follows each reference, such as ``hash``, never ends.
    """
    names: set[str] = set()
    sizes = _PickleSizes()
    for operation, argument, _ in pickletools.genops(file):
        sizes.apply(operation, argument)
        if operation.name == "PROTO" and argument != 2:
            raise ValueError(f"its pickle protocol is {argument}, and torch.save writes 2")
        if operation.name == "GLOBAL":
            module, _, name = str(argument).partition(" ")
            default = (IMPORT_MAPPING.get(module, module), name)
            module_and_name = NAME_MAPPING.get((module, name), default)
            names.add(".".join(module_and_name))
    return names


def _is_harmless(name: str) -> bool:
    """Return whether a file with ``name`` is read.

    A name outside the standard library and torch is harmless, because its objects become ``Inert``.
    """
    root, _, _ = name.partition(".")
    is_replaced = root != "torch" and root not in sys.stdlib_module_names
    return is_replaced or _HARMLESS_NAMES.fullmatch(name) is not None


def _replacement(name: str) -> Any:
    """Return the object that the reader uses for ``name``, unless torch has its own object for it."""
    # torch adds the items of a pickled container to dictionaries and lists, not to subclasses.
    if name == "collections.defaultdict":
        return lambda *_: {}
    if name == "collections.deque":
        return lambda *_: []
    return type("Inert", (Inert,), {"name": name})


def tensors_of(stored: Mapping[Any, Any], path: Path) -> dict[str, Tensor]:
    """Return copies of the tensors in ``stored``, by name. ``stored`` was read from ``path``.

    Raises DataError if a tensor is larger than its storage, or if the tensors have more values together than
    the file has bytes. Otherwise a small file with many names for one storage could exhaust the memory.
    """
    tensors = {}
    total_values = 0
    for name, tensor in stored.items():
        if not isinstance(tensor, Tensor):
            continue
        tensor = torch.detach(tensor)  # A detached tensor does not have the attributes that a file may set.
        total_values += tensor.numel()
        is_too_large = tensor.nbytes > tensor.untyped_storage().nbytes()
        if is_too_large or total_values > path.stat().st_size:
            raise DataError(f"{path} is damaged (a tensor is larger than its storage). Download it again")
        tensors[str(name)] = tensor.clone()
    return tensors


def plain_settings(settings: Any) -> Any:
    """Return settings (namespaces, OmegaConf, enums) as dictionaries, lists, texts and numbers.

    Raises DataError for settings that contain themselves.
    """
    try:
        budget = iter(range(_MAX_SETTINGS))  # Each value takes one number.
        return _convert(settings, budget)
    except (RecursionError, StopIteration):
        raise DataError("the checkpoint's settings contain themselves, or too many values") from None


def _convert(settings: Any, budget: Iterator[int]) -> Any:
    """Return ``settings`` as plain values.

    ``budget`` has as many elements as values are allowed. Raises StopIteration if there are more values.
    """
    next(budget)
    if isinstance(settings, dict):
        converted = {}
        for key, setting in settings.items():
            if isinstance(key, Inert):
                key = _convert(key, budget)
            converted[key] = _convert(setting, budget)
        return converted
    if isinstance(settings, list | tuple | set):
        return [_convert(setting, budget) for setting in settings]
    if not isinstance(settings, Inert):
        return settings
    state = vars(settings)
    if type(settings).name.startswith("omegaconf."):
        # The value of a leaf node is ``_val``, and of a container ``_content``. Its other attributes, such as
        # its parent, are not settings.
        return _convert(state.get("_val", state.get("_content")), budget)
    attributes = {}
    for name, setting in state.items():
        if not name.startswith("_"):
            attributes[name] = _convert(setting, budget)
    if not attributes and len(settings.arguments) == 1:
        # This is a member of an enum. Its only argument is its value.
        return _convert(settings.arguments[0], budget)
    return attributes
