"""Reads foreign torch.save files by ``torch.load(weights_only=True)``, without running their code.

An allow-list maps each name in a file to an ``Inert`` stand-in, so no class of fairseq or OmegaConf is
imported. torch itself builds the tensors.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speechtrain.errors import DataError, one_line
from speechtrain.files import names_in_archive, names_in_pickle, open_filled

# The admitted names are the types of settings and meters from the standard library, and dense tensors and
# their types from torch. All other names of the two are refused, even names that torch admits (sparse and
# quantised tensors).
_ADMITTED = re.compile(
    r"argparse\.Namespace|enum\.(Int)?Enum|_?operator\.getitem|copyreg\.(_reconstructor|__newobj__)"
    r"|collections\.(OrderedDict|defaultdict|deque|Counter)|typing\.(Any|Union|Optional|List|Dict|Tuple)"
    r"|pathlib\.(Pure)?(Posix|Windows)?Path|datetime\.(datetime|date|time|timedelta|timezone)|_codecs\.encode"
    r"|builtins\.(object|dict|list|tuple|(frozen)?set|str|basestring|bytes|bytearray|int|float|bool|complex"
    r"|slice|range)"
    r"|torch\.((Float|Half|BFloat16|Double|Long|Int|Short|Char|Byte|Bool)Storage|Size|device|Tensor"
    r"|(bfloat|u?int|float|complex)\d+|bool|nn\.parameter\.Parameter|_tensor\._rebuild_from_type_v2"
    r"|_utils\._rebuild_(tensor(_v2)?|parameter(_with_state)?))"
)
_MOST_SETTINGS = 2**17


class Inert:
    """Stands in for an object of a class that is not loaded. It keeps the object's arguments and state."""

    __slots__ = ("__dict__", "arguments")  # The dictionary has only the object's own state.
    arguments: tuple[Any, ...]
    name = ""

    def __new__(cls, *arguments: Any) -> Inert:
        stand_in = super().__new__(cls)
        stand_in.arguments = arguments
        return stand_in

    def __setstate__(self, state: Any) -> None:
        # A pickled state is a dictionary of attributes, or the pair of that dictionary and of the slots.
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                vars(self).update({str(name): attribute for name, attribute in part.items()})


def read_pickle(path: Path) -> Any:
    """Read a file of ``torch.save``, in its zip format or in the format before torch 1.6.

    Tensors of the zip format stay in the file until they are used. A file of the older format is read
    whole. Objects of classes outside the standard containers are ``Inert``.

    Raises DataError if the file has a name that no checkpoint needs (its code has not run then), and if
    the file is damaged or of another kind.
    """
    try:
        with open_filled(path) as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        # This verifies the checksums, which torch.load does not.
        names = names_in_archive(path, verify=True) if is_zip else _names_in_legacy(path)
        refused = sorted(name for name in names if not _is_admitted(name))
        if not refused:
            with torch.serialization.safe_globals([(_stand_in(name), name) for name in names]):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except Exception as error:  # A damaged file makes the readers raise errors of many types.
        message = str(error).rpartition("WeightsUnpickler error: ")[2].strip()
        reason = one_line(message.partition("\n")[0], 120)
        raise DataError(
            f"{path} cannot be read as a torch checkpoint ({type(error).__name__}: {reason}). Give the file "
            "that fairseq or Hugging Face wrote, or download it again"
        ) from None
    raise DataError(
        f"{path} is refused: it names {one_line(refused[0], 120)}, which no checkpoint needs, and "
        "none of its code was run. Use a file from a source that you trust"
    )


def _names_in_legacy(path: Path) -> set[str]:
    with path.open("rb") as file:
        # The file has five pickles: magic number, version, system, content, and the keys of the storages.
        return set().union(*(names_in_pickle(file) for _ in range(5)))


def _is_admitted(name: str) -> bool:
    root = name.partition(".")[0]
    return bool(_ADMITTED.fullmatch(name)) or (root != "torch" and root not in sys.stdlib_module_names)


def _stand_in(name: str) -> Any:
    if name == "collections.defaultdict":  # torch adds items to plain dictionaries and lists only.
        return lambda *_: {}
    if name == "collections.deque":
        return lambda *_: []
    return type("Inert", (Inert,), {"name": name})


def tensors_of(stored: Mapping[Any, Any], path: Path) -> dict[str, Tensor]:
    """Return copies of the tensors in ``stored``, by name. ``stored`` was read from ``path``.

    Raises DataError if a tensor is larger than its storage, or if all tensors have more values than the
    file has bytes. Names that share one storage would otherwise take many times the file's size in fp32.
    """
    tensors = {}
    total_values = 0
    for name, tensor in stored.items():
        if not isinstance(tensor, Tensor):
            continue
        tensor = torch.detach(tensor)  # A file can set attributes, which a detached tensor does not have.
        total_values += tensor.numel()
        is_too_large = tensor.nbytes > tensor.untyped_storage().nbytes()
        if is_too_large or total_values > path.stat().st_size:
            raise DataError(f"{path} is damaged (a tensor is larger than its storage). Download it again")
        tensors[str(name)] = tensor.clone()
    return tensors


def plain_settings(settings: Any) -> Any:
    """Convert settings (namespaces, OmegaConf, enums) to dictionaries, lists and numbers.

    Raises DataError for settings that contain themselves.
    """
    try:
        return _convert(settings, iter(range(_MOST_SETTINGS)))
    except (RecursionError, StopIteration):
        raise DataError("the checkpoint's settings contain themselves, or too many values") from None


def _convert(settings: Any, budget: Iterator[int]) -> Any:
    """Convert ``settings``. Each value takes one number of ``budget``. At its end StopIteration is raised."""
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
    if type(settings).name.startswith("omegaconf."):  # A node also points to its parent.
        return _convert(state.get("_val", state.get("_content")), budget)
    attributes = {name: _convert(setting, budget) for name, setting in state.items() if name[:1] != "_"}
    if not attributes and len(settings.arguments) == 1:  # The argument of an enum's member is its value.
        return _convert(settings.arguments[0], budget)
    return attributes
