"""Learning curves of `recipe=wav2vec2_fsdd`, its alarms at a collapse, and word error rates with its encoder.

    DATASET_DIR=path/to/fsdd python benchmarks/pretraining.py learn --seeds 1 2 3 --out runs/pretraining
    DATASET_DIR=path/to/fsdd python benchmarks/pretraining.py collapse --out runs/pretraining
    DATASET_DIR=path/to/fsdd python benchmarks/pretraining.py use --seeds 1 2 3 --out runs/pretraining

`learn` leaves one speaker out. It validates on that speaker, and on the test recordings of the others. Its
runs stay in --out. `collapse` plants four faults and prints the end of each run. `use` trains CTC on a tenth
of the labels, from the encoders of `learn` and from random ones, for the same number of updates. Tables are
Markdown. KEY=VALUE arguments go to every run (`device.threads=1`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any

from recipes import TRAIN, unheard
from scratch import events_of, result_of

SPEAKER = "nicolas"
PLANTED = {
    "temperature at its floor": ["model.temperature=[0.5,0.5,1.0]"],
    "temperature at the floor of large": ["model.temperature=[0.1,0.1,1.0]"],
    "learning rate by 100": ["optimizer.lr=0.2"],
    "diversity weight 0": ["model.diversity_weight=0"],
}
FIGURES = ("accuracy", "code_perplexity", "shared_negatives", "loss_contrastive")
TENTH = 45  # of the 450 utterances, which contain each recording once


def train(run_dir: Path, overrides: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train a run or continue it. Return its result and its events. A finished run stays as it is."""
    command = [str(TRAIN), *overrides, f"run_dir={run_dir}", "tracking=jsonl"]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return result_of(run_dir), events_of(run_dir)


def learn(out: Path, seeds: list[int], overrides: list[str]) -> None:
    """Print the learning curve of each seed, in training and at validations on both sets of speakers."""
    root = os.environ.get("DATASET_DIR", "fsdd")
    columns = ["seed", "step", "seconds", "set", *FIGURES]
    print(f"| {' | '.join(columns)} |\n|" + "---|" * len(columns))
    for seed in seeds:
        base = ["recipe=wav2vec2_fsdd", f"seed={seed}", *unheard(SPEAKER, root), *overrides]
        result, events = train(out / f"seed{seed}", base)
        start_time = events[0]["time"]
        for event in events:
            if event["event"] == "valid" or (event["event"] == "train" and event["step"] % 250 == 0):
                seconds = round(event["time"] - start_time)
                cells = [str(seed), str(event["step"]), str(seconds), event.get("set", "train")]
                cells += [f"{event[name]:.4g}" for name in FIGURES]
                print(f"| {' | '.join(cells)} |", flush=True)
        alarms = [event["message"] for event in events if event["event"] == "warning"]
        print(f"\nseed {seed}: {result['status']}, alarms {alarms}\n", flush=True)


def collapse(out: Path, overrides: list[str]) -> None:
    """Print the last step and the error of each planted collapse."""
    print("| planted | ended at step | said |\n|---|---|---|")
    for name, change in PLANTED.items():
        base = ["recipe=wav2vec2_fsdd", "trainer.max_steps=1000", *change, *overrides]
        result, _ = train(out / name.replace(" ", "-"), base)
        print(f"| {name} | {result['steps']} | {result.get('error', result['status'])} |", flush=True)


def use(out: Path, seeds: list[int], updates: int, overrides: list[str]) -> None:
    """Print word error rates of CTC on a tenth of the labels, from pretrained and from random encoders."""
    tuned = ["recipe=fsdd", "model=ctc", "encoder=wav2vec2_small", f"data.train.utterances={TENTH}"]
    tuned += ["encoder.mask.probability=0.2", "trainer.max_epochs=null", f"trainer.max_steps={updates}"]
    tuned += [f"trainer.validate_every={updates}", "optimizer.lr=1e-3", "trainer.ema=0", *overrides]
    print("| seed | pretrained | random |\n|---|---|---|")
    for seed in seeds:
        rates = []
        learnt = [f"init_from={out / f'seed{seed}'}", "model.freeze_encoder_steps=100"]
        for name, change in {"pretrained": learnt, "random": []}.items():
            run_dir = out / f"ctc{updates}-{name}{seed}"
            result, _ = train(run_dir, [*tuned, f"seed={seed}", *change])
            rates.append(f"{100 * result['metrics']['test/wer']:.1f} %")
        print(f"| {seed} | {' | '.join(rates)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("learn", "collapse", "use"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--updates", type=int, default=800, help="updates of a recogniser")
    parser.add_argument("--out", type=Path, default=Path("runs/pretraining"))
    arguments = parser.parse_intermixed_args()
    if arguments.what == "learn":
        learn(arguments.out, arguments.seeds, arguments.overrides)
    elif arguments.what == "collapse":
        collapse(arguments.out, arguments.overrides)
    else:
        use(arguments.out, arguments.seeds, arguments.updates, arguments.overrides)


if __name__ == "__main__":
    main()
