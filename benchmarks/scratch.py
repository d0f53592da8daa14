"""Error rates of `recipe=scratch` on a user's recordings, and whether it ends in time.

    python benchmarks/scratch.py speech --data MANIFEST --hours 0.5 --seeds 1 2 3 --stopped 2 --out DIR
    python benchmarks/scratch.py streaming --data MANIFEST --hours 0.5 --seeds 1 2 3 --out DIR [--speech 1]
    python benchmarks/scratch.py small --data FSDD_FOLDER --hours 0.05 --out DIR
    python benchmarks/scratch.py pretrained --data MANIFEST --speech 0.38 --hours 0.5 --seeds 1 2 --out DIR

`speech` trains once for each seed. The run of --stopped gets SIGINT at 40 % of its time, and is then
continued by the same command. `streaming` trains `recipe=scratch` and `recipe=streaming` in turns, and
evaluates each run by greedy and by beam search, with the whole recording and for each look-ahead. `small`
trains on small sets: a CSV, ten recordings, one recording, and a folder in which every third transcript is
missing. Its --data has the recordings of FSDD (DIGIT_SPEAKER_NUMBER.wav). `pretrained` pretrains for --hours
on all of the audio. It then trains CTC on --speech hours of the transcripts, from that encoder and from the
encoder of a single update, for the same number of updates. `streaming` has --speech for all of its runs.

Every run is a console command and stays in --out. A run that exists there is continued. Tables are Markdown.
KEY=VALUE arguments go to every run.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import soundfile
from recipes import TRAIN

from speechtrain.data.filters import Filters
from speechtrain.data.training_set import TrainingSet

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
STOP_AT = 0.4  # of the time limit
HOLD_OUT = 0.05  # the share that recipe=scratch holds out


class Splits(NamedTuple):
    """The manifests that ``write_splits`` writes."""

    valid: Path
    rest: Path
    part: Path


def train(run_dir: Path, overrides: list[str], stop_after: float | None = None) -> tuple[float, str]:
    """Run the command, and interrupt it after ``stop_after`` seconds. Return its seconds and last line."""
    start = time.perf_counter()
    command = [str(TRAIN), *overrides, f"run_dir={run_dir}"]
    log = run_dir.parent / f"{run_dir.name}.txt"
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(stop_after)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
    last_line = ""
    for line in log.read_text().splitlines():
        if "report:" not in line:
            last_line = line
    return time.perf_counter() - start, last_line


def result_of(run_dir: Path) -> dict[str, Any]:
    """Return the content of ``result.json``, or an empty mapping if the file does not exist."""
    path = run_dir / "result.json"
    if not path.exists():
        return {}
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def events_of(run_dir: Path, kind: str = "") -> list[dict[str, Any]]:
    """Return the events in ``metrics.jsonl``, or with ``kind`` only the events of this kind."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if kind in ("", event["event"])]


def print_row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def speech(options: argparse.Namespace) -> None:
    """Print the seconds and the error rates of each seed."""
    print("| seed | seconds | of the budget | updates | passes | CER held out | WER |\n|" + "---|" * 7)
    budget = options.hours * 3600
    for seed in options.seeds:
        run_dir = options.out / f"speech-{seed}"
        overrides = ["recipe=scratch", f"data.train={options.data}", f"trainer.max_hours={options.hours}"]
        overrides += [f"seed={seed}", *options.overrides]
        seconds, name = 0.0, str(seed)
        if seed == options.stopped:
            seconds, _ = train(run_dir, overrides, stop_after=STOP_AT * budget)
            name = f"{seed}, stopped once"
        seconds_to_end, last_line = train(run_dir, overrides)
        seconds += seconds_to_end
        result = result_of(run_dir)
        if not result:
            print_row(seed, last_line)
            continue
        metrics = result["metrics"]
        epochs = max(event["epoch"] for event in events_of(run_dir, "train"))
        cells = [name, f"{seconds:.0f}", percent(seconds / budget), result["steps"], f"{epochs:.1f}"]
        print_row(*cells, percent(metrics["cer"]), percent(metrics["wer"]))


def streaming(options: argparse.Namespace) -> None:
    """Print the error rates of both recipes, and of each look-ahead with the delays of its words."""
    data = [f"data.train={options.data}"]
    if options.speech:
        splits = write_splits(options.data, options.out, options.speech)
        data = [f"data.train={splits.part}", f"data.valid.dev={splits.valid}"]
    print("| seed | recipe | updates | look-ahead | CER | WER | CER, beam | WER, beam | delay | 90 % |")
    print("|" + "---|" * 10)
    for seed in options.seeds:
        for recipe in ("scratch", "streaming"):
            run_dir = options.out / f"{recipe}-{seed}"
            overrides = [f"recipe={recipe}", *data, f"trainer.max_hours={options.hours}", f"seed={seed}"]
            overrides += options.overrides
            _, last_line = train(run_dir, overrides)
            result = result_of(run_dir)
            if not result:
                print_row(seed, recipe, last_line)
                continue
            greedy, beam = evaluation(run_dir), evaluation(run_dir, "decoder=beam")
            for end in sorted(name.removeprefix("cer") for name in greedy if name.startswith("cer")):
                rates = [percent(greedy[f"{unit}{end}"]) for unit in ("cer", "wer")]
                rates += [percent(beam[f"{unit}{end}"]) for unit in ("cer", "wer")]
                delays = [seconds_cell(greedy.get(f"delay{end}{tail}")) for tail in ("", "_90")]
                print_row(seed, recipe, result["steps"], end.lstrip("_") or "all", *rates, *delays)


def seconds_cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def evaluation(run_dir: Path, *arguments: str) -> dict[str, Any]:
    """Return the metrics of the only set of ``speechtrain evaluate``."""
    command = [str(TRAIN.parent / "speechtrain-evaluate"), str(run_dir), "--json", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    (metrics,) = json.loads(process.stdout)["metrics"].values()
    found: dict[str, Any] = metrics
    return found


@dataclass
class SmallSet:
    """A data set, and its hours if the table shows them."""

    name: str
    data: Path
    hours: float = 0.0


def small_sets(recordings: Path, out: Path) -> list[SmallSet]:
    """Write the small sets into ``out``."""
    files = sorted(recordings.rglob("*.wav"))
    random.Random(1).shuffle(files)
    hours = sum(soundfile.info(path).duration for path in files) / 3600
    spoken = []
    for path in files:
        digit = path.name.split("_")[0]
        spoken.append((path, WORDS[int(digit)]))
    table = out / "all.csv"
    rows = [f"{path.absolute()},{text}\n" for path, text in spoken]
    table.write_text("path,text\n" + "".join(rows))
    incomplete = []
    for number, (path, spoken_text) in enumerate(spoken):
        text = spoken_text
        if number % 3 == 0:
            text = ""
        incomplete.append((path, text))
    return [
        SmallSet(f"CSV of {len(files)} recordings", table, hours),
        SmallSet("ten recordings", folder_of(out / "ten-recordings", spoken[:10])),
        SmallSet("one recording", folder_of(out / "one-recording", spoken[:1])),
        SmallSet("folder, every third transcript missing", folder_of(out / "third", incomplete), hours),
    ]


def small(options: argparse.Namespace) -> None:
    """Print the error rates and the last line of a run on each small set."""
    sets = small_sets(options.data, options.out)
    print("| data | hours | seconds | updates | WER held out | WER on its own recordings | last line |")
    print("|---|---|---|---|---|---|---|")
    for number, small_set in enumerate(sets):
        run_dir = options.out / f"small-{number}"
        overrides = ["recipe=scratch", f"data.train={small_set.data}", f"trainer.max_hours={options.hours}"]
        seconds, last_line = train(run_dir, [*overrides, *options.overrides])
        result = result_of(run_dir)
        training_wer = None
        if result:
            training_wer = wer_on_training_set(run_dir, small_set.data)
        held_out_wer = result.get("metrics", {}).get("wer")
        cells = [small_set.name, f"{small_set.hours:.2f}", f"{seconds:.0f}", result.get("steps", "–")]
        print_row(*cells, percent(held_out_wer), percent(training_wer), last_line)


def folder_of(folder: Path, rows: list[tuple[Path, str]]) -> Path:
    """Write a folder of recordings. If a recording has a text, a.txt is beside a.wav."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in rows:
        shutil.copy(path, folder / path.name)
        if text:
            (folder / path.name).with_suffix(".txt").write_text(text)
    return folder


def wer_on_training_set(run_dir: Path, data: Path) -> float | None:
    """Return the WER on the training data, or None if the evaluation fails."""
    try:
        return float(evaluation(run_dir, "--set", f"own={data}")["wer"])
    except subprocess.CalledProcessError:
        return None


def write_splits(manifest: Path, out: Path, hours: float) -> Splits:
    """Write the recordings that a recipe holds out, all others, and ``hours`` of random ones of these."""
    lines = [line for line in manifest.read_text().splitlines() if line.strip()]
    data = TrainingSet(str(manifest), "", Filters(0.1, 20.0, skip_empty=True), HOLD_OUT, needs_text=True)
    rest = data.rows.tolist()
    rows = rest.copy()
    random.Random(1).shuffle(rows)
    part, seconds = [], 0.0
    while rows and seconds < hours * 3600:
        row = rows.pop(0)
        part.append(row)
        seconds += data.index.seconds[row]
    splits = Splits(*(out.absolute() / f"{name}.jsonl" for name in Splits._fields))
    for path, chosen_rows in zip(splits, (data.held_out.tolist(), rest, sorted(part)), strict=True):
        with path.open("w") as file:
            for row in chosen_rows:
                record = json.loads(lines[row])
                record["audio_filepath"] = str(manifest.absolute().parent / record["audio_filepath"])
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return splits


def pretrained(options: argparse.Namespace) -> None:
    """Print CTC's error rates on a tenth of the transcripts, from a pretrained and from a random encoder."""
    splits = write_splits(options.data, options.out, options.speech)
    valid = f"data.valid.dev={splits.valid}"
    base = ["model=wav2vec2_small", "data=manifest", f"data.train={splits.rest}", valid]
    base += ["data.crop_seconds=3", "data.batch.count=8", "trainer.max_epochs=null", *options.overrides]
    pretraining, untrained = options.out / "pretraining", options.out / "untrained"
    limits = ["trainer.max_steps=null", f"trainer.max_hours={options.hours}"]
    seconds, last_line = train(pretraining, [*base, *limits])
    train(untrained, [*base, "trainer.max_steps=1", "schedule.warmup_steps=0"])
    steps = result_of(pretraining).get("steps")
    print(f"pretraining: {steps} updates, {seconds:.0f} s: {last_line}\n", flush=True)
    print("| seed | encoder | update | CER | WER |\n|---|---|---|---|---|")
    for seed in options.seeds:
        tuned = ["recipe=finetune", f"data.train={splits.part}", valid, f"seed={seed}"]
        tuned += [f"trainer.max_steps={options.updates}", f"trainer.validate_every={options.updates // 8}"]
        tuned += ["trainer.max_hours=null", *options.overrides]
        finetune(options.out, "pretrained", seed, [*tuned, f"init_from={pretraining}"])
        # A random encoder need not be frozen first.
        unfrozen = [f"init_from={untrained}", "model.freeze_encoder_steps=0"]
        finetune(options.out, "random", seed, [*tuned, *unfrozen])


def finetune(out: Path, name: str, seed: int, overrides: list[str]) -> None:
    """Train a run and print a row for each of its validations."""
    run_dir = out / f"{name}-{seed}"
    _, last_line = train(run_dir, overrides)
    if not result_of(run_dir):
        print_row(seed, name, last_line)
        return
    for event in events_of(run_dir, "valid"):
        print_row(seed, name, event["step"], percent(event["cer"]), percent(event["wer"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speech", "streaming", "small", "pretrained"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=0.5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--stopped", type=int, help="the seed whose run is stopped once and continued")
    parser.add_argument(
        "--speech", type=float, default=0.0, help="hours of the recordings (streaming, pretrained)"
    )
    parser.add_argument("--updates", type=int, default=1600, help="updates of fine-tuning (pretrained)")
    options = parser.parse_args()
    if options.what == "pretrained" and not options.speech:
        parser.error("pretrained needs --speech")
    options.out.mkdir(parents=True, exist_ok=True)
    programs = {"speech": speech, "streaming": streaming, "small": small, "pretrained": pretrained}
    programs[options.what](options)


if __name__ == "__main__":
    main()
