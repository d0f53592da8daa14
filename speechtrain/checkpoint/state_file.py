"""Files of nested states: one safetensors file that contains no code and no pickle.

The names of the tensors are their paths in the state, such as ``optimizer/state/3/exp_avg``. All other values
are JSON in the file's metadata, with the name ``values``. An object with one of these keys represents what
JSON does not have:

- ``$tensor``: the name of a tensor in the file
- ``$sharded``: shape and dtype of a sharded tensor, whose values are in other files
- ``$float``: NaN or an infinity, as text
- ``$tuple``: the elements of a tuple
- ``$items``: the keys and values of a mapping whose keys are not all texts, or begin with ``$``
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from speechtrain.dtensor import is_sharded
from speechtrain.errors import ConfigError
from speechtrain.files import apply_umask, open_filled

_MAX_CHARACTERS = 2**26
"""Limit for the JSON of a state. Most of it are the ids of skipped recordings, of which it holds 600,000."""


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a nested state to ``path``. Raises as ``write_tensors`` does, and ConfigError for other values.

    A state consists of mappings, lists, tuples, texts, numbers, None and tensors.
    """
    tensors: dict[str, Tensor] = {}
    values = _to_json(state, "", tensors)
    write_tensors(path, tensors, {"values": json.dumps(values, allow_nan=False)})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors by name to ``path``. Tensors with a common storage, such as tied weights, are copied.

    Raises OSError, RuntimeError or SafetensorError if the file cannot be written.
    """
    on_host: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        on_host[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    save_file(on_host, path, metadata)
    apply_umask(path)


def _to_json(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` as JSON, and add its tensors to ``tensors``. ``path`` is its path in the state."""
    prefix = path and f"{path}/"
    if isinstance(value, Tensor):
        if is_sharded(value):
            return {"$sharded": [list(value.shape), str(value.dtype).removeprefix("torch.")]}
        while path in tensors:  # Two keys, such as 1 and "1", may have the same text.
            path += "+"
        tensors[path] = value
        return {"$tensor": path}
    if isinstance(value, Mapping):
        items = []
        for key, element in value.items():
            items.append([_to_json(key, path, tensors), _to_json(element, f"{prefix}{key}", tensors)])
        has_plain_keys = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(items) if has_plain_keys else {"$items": items}
    if isinstance(value, list | tuple):
        elements = [_to_json(element, f"{prefix}{index}", tensors) for index, element in enumerate(value)]
        return {"$tuple": elements} if isinstance(value, tuple) else elements
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, str | int | float):
        return value
    fix = "Let state_dict return plain values and tensors"
    raise ConfigError(f"no checkpoint can store {path}, a {type(value).__name__}. {fix}")


def read_state(path: Path) -> dict[str, Any]:
    """Return the state that ``write_state`` wrote. Its tensors are copies in memory.

    Sharded tensors are on the meta device. Raises OSError if the file is a link or almost empty, and errors
    of many classes if it is damaged. Each tensor is used once, so the state is not larger than its file.
    """
    open_filled(path, follow=False).close()
    with safe_open(path, "pt") as file:
        text = file.metadata()["values"]
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"its values have {len(text)} characters, the most are {_MAX_CHARACTERS}")
        # Without a copy, the tensors would be views of the file, whose disk space could not become free.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no mapping

    def value_of(entry: dict[str, Any]) -> Any:
        """Return the value that an object of the JSON represents. Its elements are converted already."""
        kind = next(iter(entry), "")
        return readers[kind](entry[kind]) if kind in readers else entry

    readers: dict[str, Any] = {
        "$tensor": tensors.pop,
        "$sharded": _meta_tensor,
        "$float": float,
        "$tuple": tuple,
        "$items": dict,
    }
    return dict(json.loads(text, object_hook=value_of))


def _meta_tensor(content: Any) -> Tensor:
    shape, dtype = content
    return torch.empty(shape, dtype=vars(torch)[dtype], device="meta")
