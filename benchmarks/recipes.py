"""What the two recipes reach: word error rates and times of `recipe=demo` and `recipe=fsdd`.

    python benchmarks/recipes.py demo --seeds 1 2 3
    DATASET_DIR=path/to/fsdd python benchmarks/recipes.py fsdd --seeds 1 2 3
    DATASET_DIR=path/to/fsdd python benchmarks/recipes.py unheard     # each speaker left out of training
    DATASET_DIR=path/to/fsdd python benchmarks/recipes.py control     # no LayerNorm, no CTC: must fail

Each run is the console command in a process of its own; the table is Markdown. KEY=VALUE arguments
go to every run (`device.threads=1`).
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
    """Train once; the row of the table."""
    with tempfile.TemporaryDirectory(prefix="speechtrain-bench-") as folder:
        begun = time.perf_counter()
        command = [str(TRAIN), *overrides, f"run_dir={folder}/run", "tracking=jsonl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{name}: {done.stderr.strip()}")
        result = json.loads(Path(folder, "run", "result.json").read_text())
    wer = {key.split("/")[0]: value for key, value in result["metrics"].items() if key.endswith("/wer")}
    return {"run": name, **wer, "steps": result["steps"], "seconds": time.perf_counter() - begun}


def speakers(root: Path) -> list[str]:
    """The speakers whose recordings are there."""
    folder = root / "recordings" if (root / "recordings").is_dir() else root
    return sorted({path.name.split("_")[1] for path in folder.glob("*_*_*.wav")})


def unheard(speaker: str, root: str) -> list[str]:
    """Overrides that leave a speaker out of training and test on that speaker alone."""
    kind = "_target_: speechtrain.data.corpora.fsdd.Fsdd"
    node = f"{{{kind}, root: {root}, split: test, utterances: 100, only_speakers: [{speaker}]}}"
    return [f"data.train.exclude_speakers=[{speaker}]", f"data.valid.unheard={node}"]


def cell(key: str, value: object) -> str:
    """One figure of the table: counts and seconds whole, error rates in per cent."""
    return f"{value:.0f}" if key in ("steps", "seconds") else f"{100 * float(str(value)):.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("demo", "fsdd", "unheard", "control"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    arguments = parser.parse_args()
    root = os.environ.get("DATASET_DIR", "fsdd")
    plans: list[tuple[str, list[str]]] = []
    if arguments.what == "demo":
        plans = [(f"seed {seed}", ["recipe=demo", f"seed={seed}"]) for seed in arguments.seeds]
    elif arguments.what == "fsdd":
        for precision in arguments.precisions:
            base = ["recipe=fsdd", f"precision={precision}"]
            plans += [(f"{precision}, seed {seed}", [*base, f"seed={seed}"]) for seed in arguments.seeds]
    elif arguments.what == "unheard":
        plans = [(f"without {name}", ["recipe=fsdd", *unheard(name, root)]) for name in speakers(Path(root))]
    else:
        plans = [(f"control, seed {s}", ["recipe=fsdd", f"seed={s}", *NO_NORMS]) for s in arguments.seeds]
    header = False
    for name, overrides in plans:
        row = run(name, [*overrides, *arguments.overrides])
        if not header:
            print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
            header = True
        cells = [cell(key, value) for key, value in row.items() if key != "run"]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
