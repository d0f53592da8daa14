"""Make the run of ``old_runs/``, in a checkout of the release: ``make_old_runs.py FOLDER``.

The run is made twice, once to its end and once stopped by SIGTERM near its end. Beside them stands what
the release itself says of them: the losses of the undisturbed run, its evaluation and a transcript.
Later releases must read, evaluate and continue these runs. They are never made again with newer code.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import soundfile

from speechtrain.data.corpora.connected import SAMPLE_RATE
from speechtrain.data.corpora.digits import Digits

BIN = Path(sys.executable).parent
RUNS = {
    "rnnt": [
        *("recipe=demo", "tracking=jsonl", "tokenizer=characters"),
        *("device=cpu", "device.threads=1", "device.matmul=highest", "precision=fp32"),
        *("encoder=lstm_small", "encoder.hidden=10", "encoder.features.mels=9"),
        *("model.prediction.embedding=6", "model.prediction.hidden=10", "model.joint.hidden=10"),
        *("decoder.max_symbols=300", "optimizer.lr=1e-2", "schedule.warmup_steps=5"),
        *("data.workers=0", "data.train.utterances=48"),
        *("data.valid.unheard.utterances=4", "data.batch.count=4"),
        *("trainer.max_steps=900", "trainer.max_epochs=null", "trainer.keep=1", "trainer.log_every=45"),
        *("trainer.validate_every=1000", "trainer.save_every=1000"),
    ],
}
LAST_UPDATES = 135
"""A run is stopped when so many updates are left, or a few less."""


def tool(name: str, *arguments: str, cwd: Path, environment: dict[str, str]) -> str:
    line = [str(BIN / f"speechtrain-{name}"), *arguments]
    done = subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(line)}\n{done.stdout}{done.stderr}")
    return done.stdout


def steps_done(run_dir: Path) -> int:
    record = run_dir / "metrics.jsonl"
    lines = record.read_text().splitlines() if record.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return max((event["step"] for event in events if event["event"] == "train"), default=0)


def make(name: str, folder: Path, work: Path, environment: dict[str, str]) -> None:
    arguments = RUNS[name]
    environment = {**environment, "OUTPUT_DIR": str(work / name / "finished")}
    tool("train", *arguments, cwd=work, environment=environment)
    (finished,) = (work / name / "finished").iterdir()
    events = map(json.loads, (finished / "metrics.jsonl").read_text().splitlines())
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "train"}
    expected: dict[str, Any] = {
        "losses": losses,
        "evaluation": json.loads(
            tool("evaluate", str(finished), "--json", cwd=work, environment=environment)
        )["metrics"],
    }
    text = tool("transcribe", str(finished), "sample.wav", cwd=work, environment=environment)
    expected["transcript"] = text.partition("\t")[2].strip()
    assert expected["transcript"], "the run learnt nothing"

    environment["OUTPUT_DIR"] = str(work / name / "interrupted")
    line = [str(BIN / "speechtrain-train"), *arguments]
    interrupted = work / name / "interrupted" / finished.name
    process = subprocess.Popen(line, cwd=work, env=environment)
    while steps_done(interrupted) < max(losses) - LAST_UPDATES:
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75
    expected["stopped_at"] = steps_done(interrupted)
    assert expected["stopped_at"] < max(losses), "the run was stopped too late"
    for kind, run_dir in {"finished": finished, "interrupted": interrupted}.items():
        kept = folder / name / kind
        shutil.copytree(run_dir, kept, ignore=shutil.ignore_patterns("lock", "*.html", "output.log"))
        about = json.loads((kept / "run.json").read_text())
        about |= {"host": "host", "platform": "Linux", "executable": "python"}  # nothing reads them
        (kept / "run.json").write_text(json.dumps(about, indent=2) + "\n")
    (folder / name / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    work = folder.with_name(folder.name + "-work")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    environment = {**os.environ, "SPEECHTRAIN_CACHE": str(work / "cache"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONHASHSEED"] = "0"
    voices = Digits("valid", 1)
    samples = voices.plan()[0].audio(voices.clips)
    soundfile.write(work / "sample.wav", samples, SAMPLE_RATE, subtype="PCM_16")
    for name in sys.argv[2:] or RUNS:
        shutil.rmtree(folder / name, ignore_errors=True)
        make(name, folder, work, environment)
        print(name, flush=True)


if __name__ == "__main__":
    main()
