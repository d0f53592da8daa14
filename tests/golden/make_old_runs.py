"""Make the runs of ``old_runs/``, in a checkout of the release: ``make_old_runs.py FOLDER``.

Each run is made twice, once to its end and once stopped by SIGTERM near its end. Beside them stands what
the release itself says of them: the losses of the undisturbed run, its evaluation and a transcript.
Later releases must read, evaluate and continue these runs; they are never made again with newer code.
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

BIN = Path(sys.executable).parent
COMMON = [
    *("device.threads=1", "device.matmul=highest", "data.workers=0", "data.train.utterances=48"),
    *("data.valid.unheard.utterances=6", "data.batch.count=4", "trainer.max_epochs=null", "trainer.keep=1"),
    *("trainer.log_every=1", "trainer.validate_every=1000", "trainer.save_every=1000"),
]
TRANSDUCER = [
    *("recipe=demo", "tracking=jsonl", "encoder.hidden=16", "encoder.features.mels=16", "optimizer.lr=1e-2"),
    *("model.prediction_embedding=8", "model.prediction_hidden=16", "model.joint_hidden=16"),
    *("schedule.warmup_steps=5", "trainer.max_steps=400"),
]
RUNS = {
    "rnnt": [
        *TRANSDUCER,
        *("tokenizer=sentencepiece", "tokenizer.model=bpe.model", "encoder.pre_layers=2"),
        *("encoder.post_layers=2", "model.prediction_layers=2"),
        *("encoder.hidden=20", "data.train.min_words=1", "data.train.max_words=3", "trainer.max_steps=900"),
    ],
    "rnnt_two_ranks": [*TRANSDUCER, "world_size=2", "model.max_symbols=300"],
    "ctc": [
        *("model=ctc", "encoder=lstm_small", "augment=small", "optimizer=adamw", "schedule=cosine"),
        *("tracking=jsonl", "encoder.hidden=24", "encoder.features.mels=16", "optimizer.lr=1e-2"),
        *("data.train.min_words=1", "data.train.max_words=3"),
        *("schedule.warmup_steps=5", "trainer.max_steps=800", "trainer.ema=0.9", "device.lstm=loop"),
    ],
    "wav2vec2": [
        *("model=wav2vec2_small", "data=digits", "augment=small", "trainer.on_collapse=rollback"),
        "encoder.conv_layers=[[8,10,5],[8,3,2],[8,3,2],[8,3,2],[8,3,2],[8,2,2],[8,2,2]]",
        *("encoder.width=16", "encoder.feed_forward=24", "encoder.layers=2", "encoder.position_kernel=8"),
        *("encoder.position_groups=4", "encoder.layer_drop=0.2", "encoder.dropout=0.1", "model.codes=12"),
        *("model.code_width=8", "model.final_width=8", "model.negatives=8", "trainer.max_steps=24"),
        *("data.train.min_words=2", "data.train.max_words=3", "schedule.warmup_steps=5"),
    ],
}
LAST_UPDATES = 12
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
    arguments = [*RUNS[name], *COMMON]
    environment = {**environment, "OUTPUT_DIR": str(work / name / "finished")}
    tool("train", *arguments, cwd=work, environment=environment)
    (finished,) = (work / name / "finished").iterdir()
    events = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "train"}
    expected: dict[str, Any] = {
        "losses": losses,
        "evaluation": json.loads(
            tool("evaluate", str(finished), "--json", cwd=work, environment=environment)
        )["metrics"],
    }
    if name != "wav2vec2":
        text = tool("transcribe", str(finished), "sample.wav", cwd=work, environment=environment)
        expected["transcript"] = text.partition("\t")[2].strip()

    environment["OUTPUT_DIR"] = str(work / name / "interrupted")
    line = [str(BIN / "speechtrain-train"), *arguments]
    interrupted = work / name / "interrupted" / finished.name
    process = subprocess.Popen(line, cwd=work, env=environment)
    while steps_done(interrupted) < len(losses) - LAST_UPDATES:
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75
    expected["stopped_at"] = steps_done(interrupted)
    assert expected["stopped_at"] < len(losses), "the run was stopped too late"
    for kind, run_dir in {"finished": finished, "interrupted": interrupted}.items():
        kept = folder / name / kind
        shutil.copytree(run_dir, kept)
        (kept / "lock").unlink()
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
    tool("prepare", "sample", "sample.wav", cwd=work, environment=environment)
    line = ["tokenizer", "--corpus", "digits", "--out", "bpe.model", "--kind", "bpe", "--size", "24"]
    tool("prepare", *line, cwd=work, environment=environment)
    for name in sys.argv[2:] or RUNS:
        shutil.rmtree(folder / name, ignore_errors=True)
        make(name, folder, work, environment)
        print(name, flush=True)


if __name__ == "__main__":
    main()
