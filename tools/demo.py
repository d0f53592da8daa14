"""``make demo``: train the small RNN-T on the embedded corpus, score it, transcribe a file, report.

Each line that starts with ``$`` is a command that a user can type; this program only runs them.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent
RUN = Path("runs/demo")


def step(command: list[str]) -> None:
    """Show a command, run it, leave with its code where it fails."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    done = subprocess.run([str(BIN / command[0]), *command[1:]], check=False)
    if done.returncode != 0:
        sys.exit(done.returncode)


def main() -> None:
    begun = time.perf_counter()
    arguments = sys.argv[1:]  # such as seed=2; a run of its own each
    run = RUN.with_name("-".join([RUN.name, *arguments])) if arguments else RUN
    step(["speechtrain-train", "recipe=demo", f"run_dir={run}", *arguments])
    result = json.loads((run / "result.json").read_text())
    sample = run / "sample.wav"
    step(["speechtrain-prepare", "sample", str(sample)])
    step(["speechtrain-transcribe", str(run), str(sample)])
    step(["speechtrain-report", str(run)])
    print(
        f"\nWER on voices never heard in training: {100 * result['metrics']['wer']:.2f} % "
        f"({result['steps']} steps, {result['wall_s']:.0f} s of training, "
        f"{time.perf_counter() - begun:.0f} s in all)\nreport: {run / 'report.html'}"
    )


if __name__ == "__main__":
    main()
