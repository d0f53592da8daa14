"""``make demo``: train the small RNN-T on the embedded corpus, score it, transcribe a file, report.

Each line that starts with ``$`` is a command that a user can type; this program only runs them.
Arguments, such as ``seed=2``, go to the training command, each set of them in a run directory of its own.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import soundfile

from speechtrain.data.corpora.connected import SAMPLE_RATE
from speechtrain.data.corpora.digits import Digits

BIN = Path(sys.executable).parent
RUN = Path("runs/demo")


def step(command: list[str], end: str = "\n") -> None:
    """Show a command, run it, and leave with its code where it fails."""
    print(f"{end}$ {shlex.join(command)}", flush=True)
    try:
        code = subprocess.run([str(BIN / command[0]), *command[1:]], check=False).returncode
    except KeyboardInterrupt:  # the command has had it, too, and has said what it did
        code = 130
    except OSError as error:
        sys.exit(f"demo: {BIN / command[0]}: {error.strerror}; `make setup` installs it")
    if code:
        print(f"\ndemo: {command[0]} ended with code {code} (docs/reference/exit-codes.md)", file=sys.stderr)
        sys.exit(code if code > 0 else 1)


def write_sample(path: Path) -> None:
    """Write an utterance of a voice that training does not hear as WAV, and print its transcript."""
    source = Digits("valid", 1)
    utterance = source.plan()[0]
    soundfile.write(path, utterance.audio(source.clips), SAMPLE_RATE, subtype="PCM_16")
    print(f"\n{path}: voice {utterance.speaker} says: {utterance.text}", flush=True)


def main() -> None:
    begun = time.perf_counter()
    arguments = sys.argv[1:]
    run = RUN.with_name("-".join([RUN.name, *(re.sub(r"[^\w.]+", "-", a) for a in arguments)])[:120])
    for argument in arguments:
        if argument.startswith("run_dir="):
            run = Path(argument.partition("=")[2])
    arguments = [argument for argument in arguments if not argument.startswith("run_dir=")]
    step(["speechtrain", "train", "recipe=demo", f"run_dir={run}", *arguments], end="")
    try:
        result = json.loads((run / "result.json").read_text())
        rate = float(result["metrics"]["wer"])
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"demo: {run / 'result.json'} names no word error rate ({type(error).__name__}: {error})")
    sample = run / "sample.wav"
    write_sample(sample)
    step(["speechtrain", "transcribe", str(run), str(sample)])
    step(["speechtrain", "report", str(run)])
    print(
        f"\nWER on voices never heard in training: {100 * rate:.2f} % "
        f"({result['steps']} steps, {result['wall_s']:.0f} s of training, "
        f"{time.perf_counter() - begun:.0f} s in all)\nreport: {run / 'report.html'}"
    )


if __name__ == "__main__":
    main()
