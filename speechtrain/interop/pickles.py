"""Reads foreign torch.save files by ``torch.load(weights_only=True)``, without running their code.

An allow-list maps every name in a file to an ``Inert`` stand-in, so no class of fairseq or OmegaConf is
imported. torch itself admits its tensors.
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

# Of the standard library: the types of settings and meters. Of torch: dense tensors and their types.
# All other names of the two are refused, even those that torch admits (sparse, quantised).
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
    """Stands in for an object of a class that is not loaded: keeps its arguments and state."""

    __slots__ = ("__dict__", "arguments")  # the dictionary holds the object's own state only
    arguments: tuple[Any, ...]
    name = ""

    def __new__(cls, *arguments: Any) -> Inert:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):  # (attributes, slots)
            if isinstance(part, dict):
                vars(self).update({str(k): v for k, v in part.items()})


def read_pickle(path: Path) -> Any:
    """Read what ``torch.save`` wrote to ``path``, in its zip format or the one before torch 1.6.

    Tensors of the zip format stay in the file until they are used; the older format is read whole.
    Objects of classes outside the standard containers are ``Inert``. Raises DataError for a name that no
    checkpoint needs (no code has run then), and for a file that is damaged or of another kind.
    """
    try:
        with open_filled(path) as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        # torch.load verifies no checksums
        names = names_in_archive(path, verify=True) if is_zip else _names_in_legacy(path)
        refused = sorted(name for name in names if not _is_admitted(name))
        if not refused:
            with torch.serialization.safe_globals([(_stand_in(name), name) for name in names]):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except Exception as error:  # whatever damage makes the readers raise
        told = one_line(str(error).rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0], 120)
        raise DataError(
            f"{path} cannot be read as a torch checkpoint ({type(error).__name__}: {told}); give the file "
            "that fairseq or Hugging Face wrote, or download it again"
        ) from None
    raise DataError(
        f"{path} is refused: it names {one_line(refused[0], 120)}, which no checkpoint needs; none of its "
        "code was run. Use a file from a source that you trust"
    )


def _names_in_legacy(path: Path) -> set[str]:
    with path.open("rb") as file:  # a magic number, a version, the system, the content, its storages' keys
        return set().union(*(names_in_pickle(file) for _ in range(5)))


def _is_admitted(name: str) -> bool:
    root = name.partition(".")[0]
    return bool(_ADMITTED.fullmatch(name)) or (root != "torch" and root not in sys.stdlib_module_names)


def _stand_in(name: str) -> Any:
    if name == "collections.defaultdict":  # torch adds items to plain dictionaries and lists only
        return lambda *_: {}
    if name == "collections.deque":
        return lambda *_: []
    return type("Inert", (Inert,), {"name": name})


def tensors_of(stored: Mapping[Any, Any], path: Path) -> dict[str, Tensor]:
    """Return copies of the tensors in ``stored``, which was read from ``path``, by name.

    Raises DataError if a tensor is larger than its storage, and if all have more values than the file has
    bytes: names that share one storage would take many times its size in fp32.
    """
    tensors = {}
    values = 0
    for name, value in stored.items():
        if not isinstance(value, Tensor):
            continue
        bare = torch.detach(value)  # without the attributes that a file can set
        values += bare.numel()
        if bare.nbytes > bare.untyped_storage().nbytes() or values > path.stat().st_size:
            raise DataError(f"{path} is damaged (a tensor is larger than its storage); download it again")
        tensors[str(name)] = bare.clone()
    return tensors


def plain(value: Any) -> Any:
    """Convert settings (namespaces, OmegaConf, enums) to dictionaries, lists and numbers.

    Raises DataError for settings that contain themselves.
    """
    try:
        return _plain(value, iter(range(_MOST_SETTINGS)))
    except (RecursionError, StopIteration):
        raise DataError("the checkpoint's settings contain themselves, or too many values") from None


def _plain(value: Any, left: Iterator[int]) -> Any:
    next(left)
    if isinstance(value, dict):
        return {_plain(k, left) if isinstance(k, Inert) else k: _plain(v, left) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(v, left) for v in value]
    if not isinstance(value, Inert):
        return value
    state = vars(value)
    if type(value).name.startswith("omegaconf."):  # nodes also point to their parents
        return _plain(state["_val"] if "_val" in state else state.get("_content"), left)
    kept = {k: _plain(v, left) for k, v in state.items() if k[:1] != "_"}
    if not kept and len(value.arguments) == 1:  # an enum's member, by its value
        return _plain(value.arguments[0], left)
    return kept
