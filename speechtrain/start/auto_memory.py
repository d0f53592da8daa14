"""The value ``auto`` of ``data.batch.memory_gib`` and ``data.decoded_gib``. Ranks replace it by numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speechtrain.files import write_text
from speechtrain.run_directory import CONFIG
from speechtrain.start.resolved import dump, load
from speechtrain.start.run_config import RunConfig

_AUTO = "auto"


def _auto_batches(data: Mapping[Any, Any]) -> list[str]:
    """Return the keys of ``data`` whose limits of batches have ``memory_gib=auto``."""
    names = []
    for name in ("batch", "valid_batch"):
        if (data.get(name) or {}).get("memory_gib") == _AUTO:
            names.append(name)
    return names


def is_batch_memory_open(run: RunConfig) -> bool:
    """Return whether a limit of batches has ``memory_gib=auto``."""
    return bool(_auto_batches(run.data.node))


def with_batch_memory(run: RunConfig, gib: float) -> RunConfig:
    """Return ``run`` with ``gib`` in place of each ``memory_gib=auto``."""
    node = run.data.node
    batches = {name: {**node[name], "memory_gib": gib} for name in _auto_batches(node)}
    return run.with_data(**batches)


def is_decoded_memory_open(run: RunConfig) -> bool:
    """Return whether the run has ``data.decoded_gib=auto``."""
    return run.data.node.get("decoded_gib") == _AUTO


def store_batch_memory(run_dir: Path, gib: float) -> None:
    """Replace each ``memory_gib=auto`` in the run's stored config, so that a resume has the same batches."""
    path = run_dir / CONFIG
    config = load(path)
    for name in _auto_batches(config.data):
        config.data[name].memory_gib = gib
    write_text(path, dump(config))
