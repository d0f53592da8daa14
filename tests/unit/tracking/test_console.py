"""What a person sees: plain lines in a file, a live block on a terminal."""

from __future__ import annotations

import math
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from speechtrain.tracking.console import Console, TextLog, start_lines

START = {"steps": 5000, "parameters": 480029}
TRAIN = {
    "step": 50,
    "steps": 5000,
    "epoch": 3.25,
    "loss": 12.3456,
    "lr": 1e-3,
    "grad_norm": 3.2101,
    "utterances_per_s": 512.34,
    "audio_s_per_s": 1024.0,
    "data_wait": 0.034,
    "memory_mib": 1812.4,
    "eta_s": 754.0,
}
VALID = {"step": 50, "set": "test", "wer": 0.0321, "loss": 4.56, "seconds": 3.21}
ROWS = [{"id": str(i), "reference": f"ref {i}", "hypothesis": f"hyp {i}"} for i in range(5)]


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.log(
        "device", {"device": "cpu", "chip": "Xeon", "precision": "auto", "computes": "fp32 lstm=loop"}
    )
    console.log("start", START)
    console.log("train", TRAIN)
    console.log("valid", VALID)
    console.log("examples", {"step": 50, "set": "test", "rows": ROWS})
    console.log("checkpoint", {"step": 50, "path": "checkpoints/50"})
    console.log("warning", {"message": "slow [bold]disk[/]"})
    console.log(
        "end",
        {
            "status": "finished",
            "steps": 5000,
            "metrics": {"wer": 0.01234, "test/wer": 0.01234},
            "wall_s": 90061,
        },
    )
    console.close()
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "device   cpu (Xeon), computes in fp32, chosen by precision=auto",
        "network  480,029 parameters",
        "plan     5,000 steps",
        "step       50/5000  epoch   3.25  loss    12.35  lr 1.00e-03  grad     3.21   512.3 utt/s"
        "  1024.0 audio-s/s  wait   3%  mem  1,812 MiB  eta 0:12:34",
        "valid    50  test  wer 3.21 %  loss 4.56  3.2 s",
        "worst    ref  ref 0",
        "         hyp  hyp 0",
        "worst    ref  ref 1",
        "         hyp  hyp 1",
        "end      finished after 5000 steps, 1 d 01:01:01  test/wer 1.23 %",
    ]
    assert err == "warning  slow [bold]disk[/]\n"


def test_each_context_of_streams_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    streams = {"cer_1040ms": 0.031, "cer_80ms": 0.05, "wer_80ms": 0.142, "wer_1040ms": None}
    delays = {"delay_80ms": 0.1234567, "delay_80ms_90": 0.16, "delay_1040ms": math.inf}
    console = Console(mode="plain")
    console.log("valid", {**VALID, **streams, **delays})
    metrics = {"wer": 0.0321, "test/wer": 0.0321, "test/wer_80ms": 0.142, "test/delay_80ms_90": 0.16}
    console.log("end", {"status": "finished", "metrics": metrics})
    assert capsys.readouterr().out.splitlines() == [
        "valid    50  test  wer 3.21 %  loss 4.56  3.2 s",
        "stream   80 ms  cer 5.00 %  wer 14.20 %  delay 0.1235 s, 90 % 0.16 s",
        "stream   1040 ms  cer 3.10 %  wer -  delay inf s, 90 % - s",
        "end      finished  test/wer 3.21 %",
    ]


def test_worst_utterances_have_errors_and_appear_once(capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for errors, hypothesis in ((1, "no"), (1, "no"), (0, "yes"), (1, "")):
        rows.append({"id": "a", "reference": "yes", "hypothesis": hypothesis, "errors": errors})
    Console(mode="plain", examples=3).log("examples", {"step": 1, "set": "dev", "rows": rows})
    wrong = ["worst    ref  yes", "         hyp  no", "worst    ref  yes", "         hyp  "]
    assert capsys.readouterr().out.splitlines() == wrong


def test_the_log_of_a_run_has_the_lines_of_a_console(tmp_path: Path) -> None:
    log = TextLog(tmp_path)
    for event, values in {"valid": VALID, "warning": {"message": "slow\x1b disk"}, "checkpoint": {}}.items():
        log.log(event, values)
    log.log("end", {"status": "failed", "steps": 3, "error": "the disk is full"})
    lines = (tmp_path / "output.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line) for line in lines)
    assert [line.partition(" ")[2] for line in lines] == [
        "valid    50  test  wer 3.21 %  loss 4.56  3.2 s",
        r"warning  slow\x1b disk",
        "end      failed after 3 steps: the disk is full",
    ]


def test_missing_and_non_finite_values_are_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.log("start", {})
    console.log("resume", {"step": 7})
    console.log("train", {"step": 8, "loss": float("nan"), "eta_s": float("inf"), "ppl": None})
    console.log("valid", {"step": 8, "set": "a", "wer": float("nan")})
    console.log("end", {"status": "preempted"})
    console.log("unknown", {})
    assert capsys.readouterr().out.splitlines() == [
        "resume   after step 7",
        "step          8  loss      nan  ppl -",
        "valid    8  a  wer nan %",
        "end      preempted",
    ]


def test_transcripts_cannot_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"id": "a", "reference": "a\x1b[31m\nb", "hypothesis": "\r\x9b2Jc"}
    Console().log("examples", {"step": 1, "set": "a", "rows": [row]})
    out = capsys.readouterr().out
    assert out.splitlines() == [r"worst    ref  a\x1b[31m b", r"         hyp   \x9b2Jc"]


def test_a_terminal_that_cannot_spell_the_transcript_is_no_error() -> None:
    code = (
        "from speechtrain.tracking.console import Console\n"
        "row = {'reference': 'jeść', 'hypothesis': 'x'}\n"
        "Console().log('examples', {'step': 1, 'set': 'a', 'rows': [row]})"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert b"je\\u015b\\u0107" in done.stdout


_LIVE = """
import sys
from speechtrain.tracking.console import Console
console = Console()
console.log("start", {"steps": 200, "parameters": 10})
console.log("train", {"step": 100, "steps": 200, "loss": 1.5, "eta_s": 30.0})
console.log("warning", {"message": "slow [disk]"})
console.log("valid", {"step": 100, "set": "test", "wer": 0.5})
console.log("checkpoint", {"step": 100, "path": "x"})
console.log("end", {"status": "finished", "steps": 200})
console.close()
"""


def _on_a_terminal(code: str, **environment: str) -> str:
    """What ``code`` writes to a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    chunks: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(ours, 65536):
                chunks.append(chunk)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    subprocess.run(
        [sys.executable, "-c", code],
        stdout=theirs,
        stderr=theirs,
        stdin=theirs,
        check=True,
        env={**kept, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30", **environment},
    )
    os.close(theirs)
    reader.join(timeout=10)
    os.close(ours)
    return b"".join(chunks).decode()


def test_live_display() -> None:
    screen = _on_a_terminal(_LIVE)
    assert "step 100/200" in screen
    assert "0:00:30 to go" in screen
    assert "slow [disk]" in screen
    assert "saved    100" in screen
    assert screen.index("end      finished") > screen.rindex("step 100/200")
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")  # the cursor is shown again


def test_a_dumb_terminal_gets_plain_lines() -> None:
    screen = _on_a_terminal(_LIVE, TERM="dumb")
    assert "\x1b" not in screen
    assert "step     100/200" in screen


def test_the_start_has_a_line_for_data_network_and_plan(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(mode="plain")
    console.log("environment", {"host": "node-7", "OMP_NUM_THREADS": "2"})
    data = {"hours": 1.1849, "speakers": 57, "train_samples": 1900, "eval_samples": 100, "mels": 40}
    report = {
        "too_long": 1200,
        "padding_share": 0.0694,
        "held out": "100 recordings",
        "set cv": "9 recordings",
    }
    console.log("data", {**data, "updates_per_epoch": 238, "report": report})
    start = {"model": "RNNT", "parameters": 10, "ranks": 2, "accumulate": 4, "steps": 5, "warm-up steps": 2}
    start |= {"from data": "1,900 recordings: encoder.width=128"}
    console.log("start", {**start, "shapes": [(8, 48000, 0), (4, 96000, 0)], "target": None})
    plan = {"step": 9, "steps": 1204, "hours": 0.5, "validate_every": 200}
    console.log("plan", {**plan, "s_per_update": 0.31234, "s_per_validation": 3.21})
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "data     1,900 recordings, 1.18 h, 57 speakers, validation on 100, 238 updates an epoch"
        ", 6.9 % padding, left out 1,200 too_long, sets cv",
        "network  RNNT, 10 parameters",
        "plan     5 steps, 2 x 4 micro-batches a step, 2 fixed shapes, 2 warm-up steps",
        "plan     1,204 steps in 0.5 h, 0.312 s a step, a validation of 3.21 s every 200 steps",
    ]
    assert start_lines({"ranks": 1, "accumulate": 1, "shapes": []}) == []


def test_the_full_form_has_all_values_of_the_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    events = {
        "environment": {"host": "node-7", "OMP_NUM_THREADS": "2", "threads": "2", "cpus": "4"},
        "device": {"device": "cpu", "milliseconds": {"plain": 98.0, "lstm=loop": 77.0}},
        "data": {"train_samples": 48, "sample_rate": 16000, "speed": [0.9, 1.1], "f_max": None},
    }
    expected = [
        "environment: host node-7, OMP_NUM_THREADS 2, threads 2, cpus 4",
        "device: device cpu, milliseconds (plain 98.0, lstm=loop 77.0)",
        "data: train_samples 48, sample_rate 16000, speed [0.9, 1.1]",
    ]
    console, log = Console(mode="plain", form="full"), TextLog(tmp_path)
    for event, values in events.items():
        console.log(event, values)
        log.log(event, values)
    assert capsys.readouterr().out.splitlines() == expected
    lines = log.path.read_text().splitlines()
    assert [line.partition(" ")[2] for line in lines] == expected


def test_the_form_of_dll_has_three_lines(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(form="dll")
    console.log("data", {"updates_per_epoch": 40})
    console.log("start", START)
    console.log("train", {**TRAIN, "seconds": 1.948})
    console.log("epoch", {"step": 80, "epoch": 2, "seconds": 47.61, "utterances_per_s": 41.7})
    for name in ("test", "other", "test"):
        console.log("valid", {**VALID, "step": 80, "set": name})
    console.log("valid", {"step": 80, "set": "other", "seconds": 1.0, "loss": 2.0})
    _, network, _, *lines = capsys.readouterr().out.splitlines()
    assert network.startswith("network")
    for line in lines:
        assert re.match(r"DLL \d{4}-\d\d-\d\d \d\d:\d\d:\d\d - epoch    2 \| ", line)
    assert [line.partition(" | ")[2] for line in lines] == [
        "iter   10/40 | loss   12.35 | utts/s   512 | took  1.95 s | lrate 1.00e-03",
        "avg train utts/s     42 | took 47.61 s",
        "dev ema wer   3.21 | took  3.21 s",
        "other ema wer   3.21 | took  3.21 s",
        "dev ema wer   3.21 | took  3.21 s",
        "other ema wer    nan | took  1.00 s",
    ]


def test_the_last_line_has_the_speed(capsys: pytest.CaptureFixture[str]) -> None:
    speed = {
        "utterances_per_s": 512.345,
        "audio_s_per_s": 1024.0,
        "epoch_s": 35.2,
        "decode_ms_per_audio_s": 0.0,
    }
    console = Console(mode="plain")
    console.log("end", {"status": "finished", "steps": 5, "metrics": {"dev/wer": 0.5}, "speed": speed})
    console.log("end", {"status": "failed", "steps": 0, "speed": {}, "error": "no"})
    assert capsys.readouterr().out.splitlines() == [
        "end      finished after 5 steps  dev/wer 50.00 %, 512.3 utt/s, 1024 audio-s/s, 35.2 s/epoch",
        "end      failed after 0 steps: no",
    ]
