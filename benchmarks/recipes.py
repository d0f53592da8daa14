"""Word error rates and times of `recipe=demo` and `recipe=fsdd`.

    python benchmarks/recipes.py demo --seeds 1 2 3
    DATASET_DIR=path/to/fsdd python benchmarks/recipes.py fsdd --seeds 1 2 3
    DATASET_DIR=path/to/fsdd python benchmarks/recipes.py unheard     # each speaker left out of training
    DATASET_DIR=path/to/fsdd python benchmarks/recipes.py control     # no LayerNorm, no CTC: must fail

Each run is a console command. The table is Markdown. KEY=VALUE arguments go to every run
(`device.threads=1`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = Path(sys.executable).parent / "speechtrain-train"
NO_NORMS = ["encoder.layer_norm=false", "model.prediction.layer_norm=false", "model.ctc_weight=0"]


def run(name: str, overrides: list[str]) -> dict[str, object]:
    """Train once and return the row of the table."""
    with tempfile.TemporaryDirectory(prefix="speechtrain-bench-") as folder:
        start = time.perf_counter()
        command = [str(TRAIN), *overrides, f"run_dir={folder}/run", "tracking=jsonl"]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode != 0:
            sys.exit(f"{name}: {process.stderr.strip()}")
        result = json.loads(Path(folder, "run", "result.json").read_text())
    row = {"run": name}
    for metric, rate in result["metrics"].items():
        if metric.endswith("/wer"):
            row[metric.split("/")[0]] = rate
    return {**row, "steps": result["steps"], "seconds": time.perf_counter() - start}


def speakers(root: Path) -> list[str]:
    """Return the speakers of the recordings in FSDD's folder."""
    folder = root / "recordings"
    if not folder.is_dir():
        folder = root
    return sorted({path.name.split("_")[1] for path in folder.glob("*_*_*.wav")})


def unheard(speaker: str, root: str) -> list[str]:
    """Return overrides that leave a speaker out of training and test on that speaker alone."""
    kind = "_target_: speechtrain.data.corpora.fsdd.Fsdd"
    node = f"{{{kind}, root: {root}, split: test, utterances: 100, only_speakers: [{speaker}]}}"
    return [f"data.train.exclude_speakers=[{speaker}]", f"data.valid.unheard={node}"]


def cell(key: str, value: object) -> str:
    """Return the text of a figure: steps and seconds as integers, error rates in per cent."""
    if key in ("steps", "seconds"):
        return f"{value:.0f}"
    return f"{100 * float(str(value)):.2f} %"


def plans_of(arguments: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Return the name and the overrides of each run."""
    if arguments.what == "unheard":
        root = os.environ.get("DATASET_DIR", "fsdd")
        return [(f"without {name}", ["recipe=fsdd", *unheard(name, root)]) for name in speakers(Path(root))]
    bases = {"demo": {"": ["recipe=demo"]}, "control": {"control, ": ["recipe=fsdd", *NO_NORMS]}}
    bases["fsdd"] = {}
    for precision in arguments.precisions:
        bases["fsdd"][f"{precision}, "] = ["recipe=fsdd", f"precision={precision}"]
    plans = []
    for title, base in bases[arguments.what].items():
        for seed in arguments.seeds:
            plans.append((f"{title}seed {seed}", [*base, f"seed={seed}"]))
    return plans


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("demo", "fsdd", "unheard", "control"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    arguments = parser.parse_args()
    header = False
    for name, overrides in plans_of(arguments):
        row = run(name, [*overrides, *arguments.overrides])
        if not header:
            print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
            header = True
        cells = [cell(key, value) for key, value in row.items() if key != "run"]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
