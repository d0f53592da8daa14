"""A run's events as the lines of MLPerf's logger, in the order of the RNN-T reference."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import psutil

from speechtrain.files import append_line, with_finite_numbers
from speechtrain.run_directory import DATE, MLPERF, timing_start
from speechtrain.tracking.base import Tracker

_TYPES = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}


@final
class MLPerf(Tracker):
    """Appends lines of ``:::MLLOG`` and JSON to ``<run_dir>/mlperf.log``, and the three timing lines.

    The timing lines are also printed, as the scripts of the reference do.
    Each epoch is a block. A later start of the run appends ``restart``, and ``resume`` with the step of its
    checkpoint. The lines of later steps were void. A block that was open or void begins again.
    """

    background = False  # A line takes microseconds, and its time is part of the record.

    def __init__(self, run_dir: str, init: dict[str, Any], run: dict[str, Any], enabled: bool = True) -> None:
        """``init`` and ``run``: the values of the keys before and after the start of the run, in order.

        A key without a value is left out, and so are LAMB's keys for another optimizer. The events have the
        values of ``train_samples``, ``eval_samples`` and ``gradient_accumulation_steps``, and the factors of
        ``global_batch_size``. ``weights_initialization`` has a value for each tensor of the network.
        """
        self.path = Path(run_dir) / MLPERF
        self.init = init
        self.run = run
        self.enabled = enabled
        self._values: dict[str, Any] = {}  # the values of the events until the start
        self._block = 0  # the epoch whose block is open
        self._evaluated_step = 0
        self._time_s = 0.0  # of the latest line

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        """Append the lines of one event. Raises ``OSError`` if the file cannot be written."""
        if not self._time_s:  # The log has not begun.
            self._values |= values
            if event == "start":
                self._start()
            return
        step, updates = values.get("step", 0), self._values["updates_per_epoch"]
        epoch = math.ceil(step / updates)
        if event in ("train", "epoch") and epoch != self._block:
            self._stop_block(self._block)
            self._block = epoch
            # The block began at the time of the latest line.
            self._append_event("block_start", time_s=self._time_s, first_epoch_num=epoch, epoch_count=1)
            self._append_event("epoch_start", time_s=self._time_s, epoch_num=epoch)
        if event == "resume":
            self._append_event("resume", step)
        elif event == "epoch":
            self._append_event("epoch_stop", epoch_num=epoch)
            self._append_event("throughput", values["utterances_per_s"], epoch_num=epoch)
        elif event == "valid" and step > self._evaluated_step:  # of the first set only
            self._evaluated_step = step
            self._append_event("eval_start", time_s=time.time() - values["seconds"], epoch_num=epoch)
            if "wer" in values:
                self._append_event("eval_accuracy", values["wer"], epoch_num=epoch)
            self._append_event("eval_stop", epoch_num=epoch)
            if step % updates == 0:
                self._stop_block(epoch)
        elif event == "end" and values["status"] != "preempted":
            self._end(values["status"])

    def _start(self) -> None:
        """Begin or continue the log. A run begins with its first process."""
        begin = timing_start(self.path.parent)
        self._begin = begin or datetime.fromtimestamp(psutil.Process().create_time(), UTC)
        if begin:
            self._append_event("restart")
            return
        accumulate, batch = self._values["accumulate"], self.init["global_batch_size"]
        self._values["global_batch_size"] = batch and batch * accumulate * self._values["ranks"]
        self._values["gradient_accumulation_steps"] = accumulate
        self._append_and_print(f"STARTING TIMING RUN AT {self._begin:{DATE}}")
        self._append_event("init_start", time_s=self._begin.timestamp())
        self._append_values(self.init)
        self._append_event("init_stop")
        self._append_event("run_start")
        self._append_values(self.run)

    def _append_values(self, values: Mapping[str, Any]) -> None:
        is_lamb = self.run["opt_name"].endswith("LAMB")
        for key in values:
            value = self._values.get(key, values[key])
            if key == "weights_initialization":
                for tensor in filter(value.get, value):
                    self._append_event(key, tensor=tensor)
            elif value is not None and (is_lamb or "lamb" not in key):
                # An ``_alt_`` key is true for a schedule with a plateau.
                self._append_event(key, "_alt_" in key or value)

    def _stop_block(self, epoch: int) -> None:
        if epoch:
            self._append_event("block_stop", first_epoch_num=epoch)
        self._block = 0

    def _end(self, status: str) -> None:
        """End the log. A run with a target is a success if it has reached the target."""
        self._stop_block(self._block)
        successes = ("target",) if self._values["target"] else ("finished", "time")
        outcome = "success" if status in successes else "aborted"
        self._append_event("run_stop", status=outcome)
        end = datetime.now(UTC)
        seconds, org = round((end - self._begin).total_seconds()), self.init["submission_org"]
        result = f"RESULT,RNN_SPEECH_RECOGNITION,,{seconds},{org},{self._begin:{DATE}}"
        self._append_and_print(f"ENDING TIMING RUN AT {end:{DATE}}\n{result}")

    def _append_event(self, key: str, value: Any = None, time_s: float = 0.0, **metadata: Any) -> None:
        """Append an event of MLPerf's logger. Without ``time_s`` it has the present time."""
        self._time_s = max(self._time_s, time_s or time.time())
        if key in ("opt_name", "submission_benchmark"):
            value = value.rpartition(".")[2].lower()  # the name of a class without its module
        line = {
            "namespace": "",
            "time_ms": int(1000 * self._time_s),
            "event_type": _TYPES.get(key.rpartition("_")[2], "POINT_IN_TIME"),
            "key": key,
            "value": value,
            "metadata": {"file": __file__, "lineno": traceback.extract_stack(limit=2)[0].lineno, **metadata},
        }
        self._append(f":::MLLOG {json.dumps(with_finite_numbers(line))}")

    def _append_and_print(self, lines: str) -> None:
        self._append(lines)
        print(lines, flush=True)

    def _append(self, line: str) -> None:
        append_line(self.path, line.encode())
