"""speechtrain-doctor: is this machine, and a given recipe, fit to train?"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

from speechtrain import __version__
from speechtrain.commands.common import guarded, one_line

if TYPE_CHECKING:
    from omegaconf import DictConfig

GREEN, AMBER, RED = "green", "amber", "red"
Finding = tuple[str, str, str]
"""How it stands, what was looked at, what was found and what to do."""

HELP = f"""speechtrain-doctor {__version__}: look at this machine, and at a recipe on it.

usage: speechtrain-doctor [GROUP=CHOICE ...] [KEY=VALUE ...]

Takes what speechtrain-train takes. Prints a line for each thing looked at: green (fine), amber (works, but),
red (will not work, and what to do). Trains nothing that stays. Exit code 0, or 4 where a line is red.
"""


def main() -> None:
    """Console entry point."""
    sys.exit(guarded(lambda: run(sys.argv[1:])))


def run(argv: list[str]) -> int:
    """Print every finding; returns the exit code."""
    if "--help" in argv or "-h" in argv:
        print(HELP, end="")
        return 0
    worst = GREEN
    paint = {GREEN: "\033[32m", AMBER: "\033[33m", RED: "\033[31m"} if sys.stdout.isatty() else {}
    for state, what, found in findings(argv):
        print(f"{paint.get(state, '')}{state:<5}{chr(27) + '[0m' if paint else ''}  {what:<22} {found}", flush=True)
        worst = max(worst, state, key=[GREEN, AMBER, RED].index)
    return 4 if worst == RED else 0


def findings(argv: list[str]) -> Iterator[Finding]:
    """Everything that is looked at, cheapest first."""
    yield from machine()
    yield from packages()
    yield from tried("audio", decode_sample)
    from speechtrain.commands.composition import compose
    from speechtrain.commands.train import rewrite

    config: list[DictConfig] = []
    with tempfile.TemporaryDirectory(prefix="speechtrain-doctor-") as folder:

        def composed() -> str:
            from speechtrain.config import check

            config.append(compose(rewrite(argv)))
            config[0].run_dir = folder
            check(config[0])
            return f"{' '.join(argv) or 'the defaults'}: every key fits"

        yield from tried("recipe", composed)
        if config and config[0].run_dir:
            yield from recipe(config[0])


def tried(what: str, look: Callable[[], str]) -> Iterator[Finding]:
    """One finding: green with what ``look`` returns, or red with what it raised."""
    try:
        yield GREEN, what, look()
    except Exception as error:  # a doctor reports whatever it finds
        yield RED, what, one_line(f"{error}")[:300] or type(error).__name__


def machine() -> Iterator[Finding]:
    """Python, cores, memory, disk."""
    good = sys.version_info >= (3, 11)
    yield GREEN if good else RED, "python", platform.python_version() + ("" if good else "; 3.11 or newer is needed")
    from speechtrain.devices.cpu import available_memory, usable_cores

    yield GREEN, "cores", f"{usable_cores()} usable of {os.cpu_count()} ({platform.machine()})"
    memory = available_memory() / 2**30
    yield GREEN if memory >= 2 else AMBER, "memory", f"{memory:.1f} GiB available" + ("" if memory >= 2 else "; small")
    free = shutil.disk_usage(os.environ.get("OUTPUT_DIR") or Path.cwd()).free / 2**30
    state = GREEN if free >= 5 else AMBER if free >= 0.25 else RED
    yield state, "disk", f"{free:.1f} GiB free" + ("" if state == GREEN else "; set OUTPUT_DIR to a larger disk")


def packages() -> Iterator[Finding]:
    """Versions of what is needed, and of what could be used."""
    for name in ("torch", "hydra-core", "lhotse", "soundfile", "sentencepiece", "jiwer", "safetensors"):
        try:
            yield GREEN, name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield RED, name, "not installed; pip install speechtrain brings it"
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    native = "avx512_bf16" in _cpu_flags() or "amx_bf16" in _cpu_flags()
    yield GREEN, "device=cpu", f"{capability}, {torch.get_num_threads()} threads; precision=fp32 | bf16"
    if not native:
        yield AMBER, "bf16", "this chip computes bf16 in software; precision=fp32 will be faster"
    if util.find_spec("tensorboard") is None:
        yield AMBER, "tensorboard", "not installed; events are not written"


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return set(next((line for line in text.splitlines() if line.startswith("flags")), "").split())


def decode_sample() -> str:
    """Write and read back a second of audio in each format that the data layer promises."""
    import numpy as np
    import soundfile

    with tempfile.TemporaryDirectory() as folder:
        tone = 0.1 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
        for suffix in ("wav", "flac"):
            path = Path(folder) / f"tone.{suffix}"
            soundfile.write(path, tone, 16000)
            read, rate = soundfile.read(path)
            if rate != 16000 or abs(read - tone).max() > 1e-3:
                raise ValueError(f"{suffix} is not read back as it was written")
    return f"WAV and FLAC are read (libsndfile {soundfile.__libsndfile_version__})"


def recipe(config: DictConfig) -> Iterator[Finding]:
    """The data, the tokenizer and one training step of a recipe."""
    import torch

    from speechtrain.batch import Batch
    from speechtrain.config import build
    from speechtrain.worker import build_task, open_device

    try:
        device, precision = open_device(config, 0)
        task, tokenizer = build_task(config)
    except Exception as error:  # a doctor reports whatever it finds
        yield RED, "model", one_line(str(error))[:300]
        return
    parameters = sum(p.numel() for p in task.parameters())
    yield GREEN, "model", f"{parameters:,} parameters, {tokenizer.size} classes with the blank"
    batches: list[Batch] = []

    def data_layer() -> str:
        data = build(config, "data", tokenizer=tokenizer, footprint=task.footprint())
        try:
            data.check()
            batches.append(next(iter(data.train())))
            shapes = data.shapes()
            fixed = f", {len(shapes)} fixed shapes" if shapes else ""
            return f"{data.micro_batches_per_epoch} micro-batches an epoch{fixed}; every transcript can be spelled"
        finally:
            data.close()

    yield from tried("data", data_layer)
    if not batches:
        return
    batch = batches[0]

    def lengths() -> str:
        seconds, labels = batch.audio_lengths.max().item() / 16000, batch.label_lengths.max().item()
        return f"first batch: {len(batch.ids)} rows, up to {seconds:.1f} s and {labels} labels"

    yield from tried("lengths", lengths)

    def step() -> str:
        torch.manual_seed(0)
        with precision.autocast(device.name):
            loss = task.train()(device.move(batch))
        torch.autograd.backward(loss.total)
        norm = torch.nn.utils.get_total_norm([p.grad for p in task.parameters() if p.grad is not None])
        if not (torch.isfinite(loss.total) and torch.isfinite(norm)):
            raise ValueError("the loss or the gradient of the first batch is not finite")
        return f"loss {loss.total.item() / max(1.0, loss.weight.item()):.3f}, peak memory {device.memory() / 2**20:.0f} MiB"

    yield from tried("one step", step)


if __name__ == "__main__":
    main()
