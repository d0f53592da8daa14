"""The watchdog of a rank, and the end of a rank that hangs."""

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

_RANK0_HEAD_START_SECONDS = 1.0  # Other ranks wait, so that rank 0 prints before torchrun kills all ranks.


def watch(attempt: Attempt, run_dir: Path, seconds: float) -> Watch:
    """Start this rank's watchdog. All ranks must call it.

    Its reports go to a folder named after the time of rank 0's start, which differs between attempts.
    """
    group, world = attempt.group, attempt.group.world
    # The ranks need the same time, so they sum the time of rank 0 and the zeros of the other ranks.
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
    """End this rank even if its main thread hangs. The result of the rank names the stuck rank."""
    # The stuck rank reports the hang. If it does not answer, the next rank that answers reports it.
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
    """Kill the processes of ``ranks`` on this host. They do not answer, so they do not end by themselves."""
    for pid, environment in siblings_of(os.getpid()).items():
        with contextlib.suppress(MachineError):
            if World.from_environment(environment).rank in ranks:
                kill(pid)
