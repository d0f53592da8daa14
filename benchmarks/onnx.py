"""Texts and speed of an export of ``speechtrain export --to onnx``, in a Python without torch.

    speechtrain export RUN --to onnx --out EXPORT
    python benchmarks/onnx.py RUN EXPORT --python VENV/bin/python

VENV has onnxruntime, numpy and soundfile. The program writes the held-out recordings of the run, and 20
recordings of 20 to 40 s that are joined from them, as WAV. It compares PyTorch's texts with ONNX's texts from
VENV. It times each command on all held-out recordings and on one of them, on one core and in turn. The
real-time factor is the difference of both times for each second of audio.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import soundfile

from speechtrain.export import held_out
from speechtrain.export.held_out import Utterance
from speechtrain.inference.loaded_run import LoadedRun, load
from speechtrain.metrics import error_rates

JOINED, LEAST_SECONDS = 20, 20.0


def joined(utterances: list[Utterance], rate: int) -> list[Utterance]:
    """Return recordings of 20 to 40 s. Each one joins successive held-out recordings."""
    recordings = []
    for number in range(JOINED):
        seconds = LEAST_SECONDS + number / 2  # 20 to 30 s, before the last recording of up to 10 s
        parts, index = [], number * 7
        while sum(len(part.samples) for part in parts) < seconds * rate:
            parts.append(utterances[index % len(utterances)])
            index += 1
        samples = np.concatenate([part.samples for part in parts])
        text = " ".join([part.reference for part in parts])
        recordings.append(Utterance(f"joined{number}", samples, text))
    return recordings


def transcripts(command: list[str], paths: list[Path]) -> list[str]:
    """Return the text of each recording that ``command`` prints."""
    process = subprocess.run([*command, *map(str, paths)], capture_output=True, text=True, check=True)
    return [line.partition("\t")[2] for line in process.stdout.splitlines()]


def compare(
    name: str, utterances: list[Utterance], loaded: LoadedRun, recognise: list[str], folder: Path
) -> None:
    """Print the numbers of other texts and the error rates on ``utterances``."""
    paths = []
    for number, utterance in enumerate(utterances):
        path = folder / f"{name}-{number}.wav"
        soundfile.write(path, utterance.samples, loaded.sample_rate, subtype="FLOAT")
        paths.append(path)
    references = [utterance.reference for utterance in utterances]
    torch_texts = [held_out.text_of(loaded, utterance.samples) for utterance in utterances]
    texts = {"pytorch": torch_texts}
    for precision, options in {"fp32": [], "int8": ["--int8"]}.items():
        texts[precision] = transcripts([*recognise, *options], paths)
    for precision, hypotheses in texts.items():
        errors, units = error_rates(zip(references, hypotheses, strict=True))["cer"]
        differences = 0
        for torch_text, text in zip(torch_texts, hypotheses, strict=True):
            differences += torch_text.strip() != text.strip()
        print(f"{name}: {len(paths)}, {precision}: other texts {differences}, CER {errors / units:.2%}")


def seconds_of(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(["taskset", "-c", "0", *command], capture_output=True, check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("export", type=Path)
    parser.add_argument("--python", default=sys.executable, help="Python without torch")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    loaded = load(arguments.run, "device=cpu", "precision=fp32", "device.threads=1")
    utterances = list(held_out.utterances(loaded))
    long_recordings = joined(utterances, loaded.sample_rate)
    seconds = sum(len(utterance.samples) for utterance in utterances) / loaded.sample_rate
    recognise = [arguments.python, str(arguments.export / "recognise.py")]
    has_torch = subprocess.run([arguments.python, "-c", "import torch"], capture_output=True).returncode == 0
    print(f"torch in {arguments.python}: {has_torch}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compare("held_out", utterances, loaded, recognise, folder)
        compare("joined", long_recordings, loaded, recognise, folder)
        print_speed(arguments, recognise, folder, seconds)


def print_speed(arguments: argparse.Namespace, recognise: list[str], folder: Path, seconds: float) -> None:
    """Print the real-time factor of each command on the held-out recordings, as medians of the rounds."""
    paths = [str(path) for path in sorted(folder.glob("held_out-*.wav"))]
    transcribe = [sys.executable, "-m", "speechtrain.commands.transcribe", str(arguments.run)]
    commands = {
        "recognise.py": recognise,
        "recognise.py --int8": [*recognise, "--int8"],
        "speechtrain transcribe": [*transcribe, "device=cpu", "device.threads=1", "precision=fp32"],
    }
    factors: dict[str, list[float]] = {command: [] for command in commands}
    starts: dict[str, list[float]] = {command: [] for command in commands}
    for _ in range(arguments.rounds):
        for command, line in commands.items():
            start = seconds_of([*line, paths[0]])
            starts[command].append(start)
            factors[command].append((seconds_of([*line, *paths]) - start) / seconds)
    for command in commands:
        factor, start = np.median(factors[command]), np.median(starts[command])
        print(f"{command}: real-time factor {factor:.4f}, start {start:.1f} s, {seconds:.0f} s of audio")


if __name__ == "__main__":
    main()
