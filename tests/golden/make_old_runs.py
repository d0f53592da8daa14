"""Write the run that later versions must read: ``make_old_runs.py`` replaces ``old_runs/VERSION``.

The folder ``run`` holds a run that SIGTERM stopped near its end. ``expected.json`` holds what this version
says of it: the losses of the same run without a stop, and the evaluation and a transcript of the stopped run.
After a release, a run of its version is never made again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import soundfile

import speechtrain
from speechtrain.data.corpora.connected import SAMPLE_RATE
from speechtrain.data.corpora.digits import Digits

RUN = (
    *("recipe=demo", "tracking=jsonl", "tokenizer=characters"),
    *("device=cpu", "device.threads=1", "device.matmul=highest", "precision=fp32"),
    *("encoder=lstm_small", "encoder.hidden=10", "encoder.features.mels=9"),
    *("model.prediction.embedding=6", "model.prediction.hidden=10", "model.joint.hidden=10"),
    *("decoder.max_symbols=300", "optimizer.lr=1e-2", "schedule.warmup_steps=5"),
    *("data.workers=0", "data.train.utterances=48"),
    *("data.valid.unheard.utterances=4", "data.batch.count=4"),
    *("trainer.max_steps=900", "trainer.max_epochs=null", "trainer.keep=1", "trainer.log_every=45"),
    *("trainer.validate_every=1000", "trainer.save_every=1000"),
)
LAST_UPDATES = 135
"""The run is stopped when at most so many updates are left."""


class Maker:
    """Starts the commands of this checkout in the folder ``work``."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.environment = {
            **os.environ,
            "SPEECHTRAIN_CACHE": str(work / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
        }

    def start(self, command: str, *arguments: str) -> subprocess.Popen[str]:
        line = [str(Path(sys.executable).with_name("speechtrain")), command, *arguments]
        return subprocess.Popen(
            line,
            cwd=self.work,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def output(self, command: str, *arguments: str) -> str:
        process = self.start(command, *arguments)
        out, err = process.communicate()
        if process.returncode:
            sys.exit(f"{command} {' '.join(arguments)}\n{out}{err}")
        return out

    def losses(self) -> dict[int, float]:
        """Train without a stop, and return the loss of each logged step."""
        self.output("train", *RUN, "run_dir=undisturbed")
        return losses_of(self.work / "undisturbed")

    def stopped_run(self, last_step: int) -> Path:
        """Train until SIGTERM, and return the run directory."""
        self.environment["OUTPUT_DIR"] = str(self.work / "stopped")
        process = self.start("train", *RUN)
        while process.poll() is None:
            for run_dir in self.work.glob("stopped/*"):
                if max(losses_of(run_dir), default=0) >= last_step - LAST_UPDATES:
                    process.send_signal(signal.SIGTERM)
                    assert process.wait() == 75, "the run ended before it was stopped"
                    return run_dir
            time.sleep(0.002)
        sys.exit("the run ended before it was stopped")

    def expectations(self, run_dir: Path, losses: dict[int, float]) -> dict[str, Any]:
        """Return what this version says of the run."""
        evaluation = json.loads(self.output("evaluate", str(run_dir), "--json"))
        voices = Digits("valid", 1)
        samples = voices.plan()[0].audio(voices.clips)
        soundfile.write(self.work / "sample.wav", samples, SAMPLE_RATE, subtype="PCM_16")
        line = self.output("transcribe", str(run_dir), "sample.wav")
        transcript = line.partition("\t")[2].strip()
        assert transcript, "the run learnt nothing"
        result = json.loads((run_dir / "result.json").read_text())
        return {
            "losses": losses,
            "evaluation": evaluation["metrics"],
            "transcript": transcript,
            "stopped_at": result["steps"],
        }


def losses_of(run_dir: Path) -> dict[int, float]:
    """Return the loss of each logged step. The last line may be half-written."""
    log = run_dir / "metrics.jsonl"
    if not log.exists():
        return {}
    lines = log.read_text().splitlines()
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return {event["step"]: event["loss"] for event in events if event["event"] == "train"}


def store(run_dir: Path, folder: Path) -> None:
    """Copy what later versions read of a run, without facts of this machine."""
    shutil.copytree(run_dir, folder, ignore=shutil.ignore_patterns("lock", "*.html", "output.log"))
    about = json.loads((folder / "run.json").read_text())
    about |= {"host": "host", "platform": "Linux", "executable": "python", "folder": "", "hosts": {}}
    about["latest"] = None
    (folder / "run.json").write_text(json.dumps(about, indent=2) + "\n")


def main() -> None:
    place = Path(__file__).with_name("old_runs") / speechtrain.__version__
    with tempfile.TemporaryDirectory(prefix="old-run-") as work:
        maker = Maker(Path(work))
        losses = maker.losses()
        run_dir = maker.stopped_run(max(losses))
        shutil.rmtree(place, ignore_errors=True)
        store(run_dir, place / "run")
        expectations = maker.expectations(run_dir, losses)
    (place / "expected.json").write_text(json.dumps(expectations, indent=1) + "\n")


if __name__ == "__main__":
    main()
