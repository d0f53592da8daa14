"""The start of a rank's watchdog, and the end of the process when the watchdog finds a hang."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

import torch

from speechtrain.distributed.watchdog import HangDiagnosis, HangReport, Stuck, Watch
from speechtrain.errors import MachineError
from speechtrain.files import write_text
from speechtrain.launcher import World
from speechtrain.rank.attempt import Attempt
from speechtrain.run_directory import ERROR, STUCK, rank_folder, write_result
from speechtrain.supervision.process_tree import kill, kill_descendants, siblings_of

_RANK0_HEAD_START_SECONDS = 1.0
"""Other ranks exit later by this time, so that rank 0 can print before torchrun kills all ranks."""


def watch(attempt: Attempt, run_dir: Path, seconds: float) -> Watch:
    """Start and return this rank's watchdog. All ranks must call this function.

    A rank without progress for ``seconds`` counts as stuck. The reports of all ranks are in the same folder,
    whose name is the start time of rank 0.
    """
    group, world = attempt.group, attempt.group.world
    # All ranks need the start time of rank 0. The other ranks add zeros, so the sum is this time.
    start_seconds = torch.zeros(1, dtype=torch.float64)
    if world.rank == 0:
        start_seconds[0] = int(time.time())
    start_time = time.gmtime(float(group.sum(start_seconds)[0]))
    folder = run_dir / STUCK / time.strftime("%Y%m%dT%H%M%SZ", start_time)

    def leave(diagnosis: HangDiagnosis, report: HangReport) -> None:
        _exit_stuck(attempt, rank_folder(run_dir, world.rank), diagnosis, report=report)

    watchdog = Watch(group.rank_status, world.rank, world.size, folder=folder, seconds=seconds, leave=leave)
    return watchdog.start()


def _exit_stuck(attempt: Attempt, folder: Path, diagnosis: HangDiagnosis, report: HangReport) -> NoReturn:
    """Write the failed result of this rank and end its process, although its main thread may hang.

    ``diagnosis`` is the same on all ranks and names the stuck rank. ``report`` has the phase and the stack of
    this rank.
    """
    # One rank, the reporter, is marked as the cause of the failure. It is the stuck rank, or, if that rank
    # does not answer, the next rank that answers.
    reporter = diagnosis.rank
    while reporter in diagnosis.silent_ranks:
        reporter += 1
    if reporter == attempt.group.world.size:  # No rank after the stuck rank answers.
        reporter = 0
    is_reporter = report.rank == reporter
    message = f"{report}: rank {diagnosis.rank} is stuck"
    if is_reporter:
        message = diagnosis.message
    failure = {"rank": report.rank, "failed_at": time.time(), "is_cause": is_reporter}
    result = {**attempt.result(), "error": message, "exit_code": Stuck.exit_code, **failure}
    with contextlib.suppress(OSError):
        write_text(
            folder / ERROR, f"{diagnosis.message}\n\n{report.other_stacks}{report.stack}", durable=False
        )
        write_result(folder, result)
    with contextlib.suppress(OSError, ValueError):
        stack = f"speechtrain: the stack of rank {diagnosis.rank}:\n{diagnosis.stack}"
        print(stack, file=sys.stderr, flush=True)
    if report.rank:
        time.sleep(_RANK0_HEAD_START_SECONDS)
    kill_descendants(os.getpid())
    _kill_siblings(diagnosis.silent_ranks)
    os._exit(Stuck.exit_code)


def _kill_siblings(ranks: Collection[int]) -> None:
    """Kill the processes of ``ranks`` on this host. Their watchdogs do not answer and cannot end them."""
    for pid, environment in siblings_of(os.getpid()).items():
        with contextlib.suppress(MachineError):
            if World.from_environment(environment).rank in ranks:
                kill(pid)
