"""The ranks of a test file: real processes, which meet over gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

RANKS = 2
PROGRAM = """
import importlib.util, pathlib, sys, torch
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("members", sys.argv[1])
module = sys.modules["members"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
rank, folder = int(sys.argv[2]), pathlib.Path(sys.argv[3])
torch.save(module.member(rank, folder), folder / f"{rank}.pt")
"""


def accounts_of_ranks(file: str, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Call ``member(rank, folder)`` of a file in two processes. Return the results and the errors."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = str(found.getsockname()[1])
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in range(RANKS):
        line = [sys.executable, "-c", PROGRAM, file, str(rank), str(folder)]
        processes.append(subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        complaints = [process.communicate(timeout=600)[1] for process in processes]
        assert [process.returncode for process in processes] == [0] * RANKS, complaints
    finally:
        for process in processes:
            process.kill()
    results = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]
    return results, "".join(complaints)
