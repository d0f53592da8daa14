"""What `recipe=scratch` reaches on recordings of one's own, and whether it ends when it should.

    python benchmarks/scratch.py speech --data MANIFEST --hours 0.5 --seeds 1 2 3 --stopped 2 --out DIR
    python benchmarks/scratch.py small --data FSDD_FOLDER --hours 0.05 --out DIR
    python benchmarks/scratch.py pretrained --data MANIFEST --hours 0.5 --seeds 1 2 --out DIR

`speech` trains once for each seed; the run of --stopped gets SIGINT at 40 % of its time, and the same
command again. `small` trains on what people may have at hand: a CSV, ten recordings, one, and a folder in
which every third transcript is missing; --data has FSDD's recordings (DIGIT_SPEAKER_NUMBER.wav).
`pretrained` pretrains for --hours on all of the audio, then compares CTC on a tenth of the transcripts from
that encoder and from one of a single update, at equal updates. Every run is the console command in a
process of its own and stays in --out; what is there is continued. Tables are Markdown; KEY=VALUE arguments
go to every run.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import soundfile
from recipes import TRAIN

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
STOP_AT = 0.4  # of the time


def train(run_dir: Path, overrides: list[str], stop_after: float | None = None) -> tuple[float, str]:
    """Run the command, interrupted after ``stop_after`` seconds of it: its seconds, and its last line."""
    begun = time.perf_counter()
    command = [str(TRAIN), *overrides, f"run_dir={run_dir}"]
    with (run_dir.parent / f"{run_dir.name}.txt").open("ab") as output:
        running = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            running.wait(stop_after)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)
            running.wait()
    lines = (run_dir.parent / f"{run_dir.name}.txt").read_text().splitlines()
    told = [line for line in lines if "report:" not in line] or [""]
    return time.perf_counter() - begun, told[-1]


def result_of(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "result.json"
    return json.loads(path.read_text()) if path.exists() else {}


def events_of(run_dir: Path, event: str) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [found for line in lines if (found := json.loads(line))["event"] == event]


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def speech(given: argparse.Namespace) -> None:
    """Seconds and error rates of each seed."""
    print("| seed | seconds | of the budget | updates | passes | CER held out | WER |\n|" + "---|" * 7)
    for seed in given.seeds:
        run_dir, budget = given.out / f"speech-{seed}", given.hours * 3600
        base = [
            "recipe=scratch",
            f"data.train={given.data}",
            f"trainer.max_hours={given.hours}",
            f"seed={seed}",
        ]
        base += given.overrides
        seconds, told = 0.0, ""
        if seed == given.stopped:
            seconds, told = train(run_dir, base, stop_after=STOP_AT * budget)
        more, told = train(run_dir, base)
        result = result_of(run_dir)
        if not result:
            print(f"| {seed} | {told} |", flush=True)
            continue
        metrics, name = result["metrics"], f"{seed}, stopped once" if seed == given.stopped else str(seed)
        passes = max(event["epoch"] for event in events_of(run_dir, "train"))
        row = [
            name,
            f"{seconds + more:.0f}",
            percent((seconds + more) / budget),
            result["steps"],
            f"{passes:.1f}",
        ]
        print(
            "| " + " | ".join(map(str, [*row, *(percent(metrics[key]) for key in ("cer", "wer"))])) + " |",
            flush=True,
        )


def small(given: argparse.Namespace) -> None:
    """What each small set ends with."""
    given.out.mkdir(parents=True, exist_ok=True)
    files = sorted(path for path in given.data.rglob("*.wav"))
    random.Random(1).shuffle(files)
    spoken = [(path, WORDS[int(path.name.split("_")[0])]) for path in files]
    table = given.out / "all.csv"
    table.write_text("path,text\n" + "".join(f"{path.absolute()},{text}\n" for path, text in spoken))
    sets = {f"CSV of {len(files)} recordings": table}
    for name, rows in (("ten recordings", spoken[:10]), ("one recording", spoken[:1])):
        sets[name] = folder_of(given.out / name.replace(" ", "-"), rows)
    third = [(path, "" if number % 3 == 0 else text) for number, (path, text) in enumerate(spoken)]
    sets["folder, every third transcript missing"] = folder_of(given.out / "third", third)
    print("| data | hours | seconds | updates | WER held out | WER on its own recordings | last line |")
    print("|---|---|---|---|---|---|---|")
    for number, (name, data) in enumerate(sets.items()):
        run_dir = given.out / f"small-{number}"
        base = ["recipe=scratch", f"data.train={data}", f"trainer.max_hours={given.hours}", *given.overrides]
        seconds, told = train(run_dir, base)
        result = result_of(run_dir)
        metrics = result.get("metrics", {})
        own = own_error(run_dir, data) if result else None
        hours = sum(soundfile.info(path).duration for path, _ in spoken) / 3600 if number in (0, 3) else 0.0
        row = [
            name,
            f"{hours:.2f}",
            f"{seconds:.0f}",
            result.get("steps", "–"),
            percent(metrics.get("wer")),
            percent(own),
        ]
        print("| " + " | ".join(map(str, [*row, told])) + " |", flush=True)


def folder_of(folder: Path, rows: list[tuple[Path, str]]) -> Path:
    """A folder of recordings with a.txt beside a.wav, where there is a text."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in rows:
        shutil.copy(path, folder / path.name)
        if text:
            (folder / path.name).with_suffix(".txt").write_text(text)
    return folder


def own_error(run_dir: Path, data: Path) -> float | None:
    """The WER on what was trained on."""
    command = [str(TRAIN.parent / "speechtrain-evaluate"), str(run_dir), "--set", f"own={data}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout)["metrics"]["own"]["wer"] if done.returncode == 0 else None


def pretrained(given: argparse.Namespace) -> None:
    """The curves of CTC on a tenth of the transcripts, from a pretrained encoder and from random weights."""
    given.out.mkdir(parents=True, exist_ok=True)
    records = [json.loads(line) for line in given.data.read_text().splitlines() if line.strip()]
    for record in records:
        record["audio_filepath"] = str(given.data.absolute().parent / record["audio_filepath"])
    random.Random(1).shuffle(records)
    valid, rest = records[: len(records) // 20], records[len(records) // 20 :]
    tenth = rest[: len(rest) // 10]
    for name, rows in {"valid": valid, "rest": rest, "tenth": tenth}.items():
        (given.out / f"{name}.jsonl").write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        )
    sets = [f"data.valid.dev={given.out.absolute() / 'valid.jsonl'}"]
    base = ["model=wav2vec2_small", "data=manifest", f"data.train={given.out.absolute() / 'rest.jsonl'}"]
    base += [*sets, "data.crop_seconds=3", "data.batch.count=8", "trainer.max_epochs=null", *given.overrides]
    learnt, untrained = given.out / "pretraining", given.out / "untrained"
    planned = ["trainer.max_steps=null", f"trainer.max_hours={given.hours}"]
    seconds, told = train(learnt, [*base, *planned])
    train(untrained, [*base, "trainer.max_steps=1", "schedule.warmup_steps=0"])
    print(f"pretraining: {result_of(learnt).get('steps')} updates, {seconds:.0f} s: {told}\n", flush=True)
    print("| seed | encoder | update | CER | WER |\n|---|---|---|---|---|")
    for seed in given.seeds:
        tuned = [
            "recipe=finetune",
            f"data.train={given.out.absolute() / 'tenth.jsonl'}",
            *sets,
            f"seed={seed}",
        ]
        tuned += [f"trainer.max_steps={given.updates}", f"trainer.validate_every={given.updates // 8}"]
        tuned += ["trainer.max_hours=null", *given.overrides]
        begin = {"pretrained": [f"init_from={learnt}"]}
        begin["random"] = [f"init_from={untrained}", "model.freeze_encoder_steps=0"]  # nothing to keep
        for name, change in begin.items():
            run_dir = given.out / f"{name}-{seed}"
            _, told = train(run_dir, [*tuned, *change])
            if not result_of(run_dir):
                print(f"| {seed} | {name} | {told} |", flush=True)
                continue
            for event in events_of(run_dir, "valid"):
                row = [seed, name, event["step"], percent(event["cer"]), percent(event["wer"])]
                print("| " + " | ".join(map(str, row)) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speech", "small", "pretrained"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=0.5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--stopped", type=int, help="the seed whose run is stopped once and continued")
    parser.add_argument("--updates", type=int, default=1600, help="of fine-tuning (pretrained)")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    {"speech": speech, "small": small, "pretrained": pretrained}[given.what](given)


if __name__ == "__main__":
    main()
