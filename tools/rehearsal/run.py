"""Rehearses a recipe for a device that this machine lacks, with training steps on the CPU.

    python tools/rehearsal/run.py recipe=mlperf device=hpu
    python tools/rehearsal/run.py recipe=demo device=hpu device.mode=compile

It prints a line for each check. The first fault ends it with an error, which names the file and the line of
the code if a check knows them. ``docs/devices.md`` says what the lines mean.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from speechtrain.commands._cli import Parser, console
from speechtrain.compute_policy import ComputePolicy, apply_policy
from speechtrain.data.base import DataModule
from speechtrain.devices.base import Device
from speechtrain.errors import MachineError, one_line
from speechtrain.files import write_text
from speechtrain.rank.build import build_task
from speechtrain.rank.trial_steps import batches_by_size
from speechtrain.start.build import build_data
from speechtrain.start.job import config_of_new_run
from speechtrain.start.resolved import dump
from speechtrain.start.run_config import part_of, run_config
from speechtrain.start.targets import described_error
from speechtrain.training.graph_warmup import padding_batch
from tools.rehearsal.operations import operations_of
from tools.rehearsal.recorded_updates import RecordedUpdates

ROOT = Path(__file__).resolve().parents[2]
_COUNTED_SHAPES = 2  # the second one shows a dynamic shape


def parser() -> Parser:
    parser = Parser(
        prog="python tools/rehearsal/run.py",
        description="Run training steps of a recipe on the CPU as a device that is absent would run them, "
        "and name the line of code that the device does not allow. The arguments are those of a training.",
        examples=["python tools/rehearsal/run.py recipe=mlperf device=hpu"],
        exit_codes="0 if the recipe fits the device, 2 config, 3 data, 4 a fault of a step",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="also GROUP=CHOICE: the recipe")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="your own choices of the groups")
    return parser


def run(argv: list[str]) -> int:
    """Print a line for each check. Raises a SpeechtrainError at the first fault."""
    arguments = parser().parse_intermixed_args(argv)
    with tempfile.TemporaryDirectory(prefix="speechtrain-rehearsal-") as name:
        config = config_of_new_run(arguments.overrides, arguments.config_dir, name).config
        try:
            for subject, text in rehearse(config, Path(name)):
                print(f"{subject:<13} {text}", flush=True)
        except RuntimeError as error:  # of torch, on the CPU
            raise MachineError(f"a step fails: {one_line(described_error(error), 300)}") from error
    return 0


def rehearse(config: DictConfig, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the subject and the text of each check. ``folder`` is a new folder for files of the checks."""
    device = part_of(config, "device").build()
    # The vendor's CTC kernel does not run on the CPU, so torch's CTC loss replaces it.
    policy = replace(device.policy(part_of(config, "precision").build().dtype), ctc_kernel=None)
    task, tokenizer = build_task(run_config(config))
    with closing(build_data(run_config(config), tokenizer, task)) as data:
        device.validate_shapes(data.shapes())
        apply_policy(task, policy)
        updates = RecordedUpdates(config, data, task, device, policy=policy, folder=folder)
        yield "recorder", updates.run()
        yield "fake device", run_fake_step(config, data, folder)
        if device.static_shapes and policy.compiler:
            yield "graphs", count_graphs_of_steps(config, data, device, policy)


def run_fake_step(config: DictConfig, data: DataModule, folder: Path) -> str:
    """Run the smallest and the largest batch on the fake device. Return the line that the process prints."""
    path = folder / "fake.yaml"
    write_text(path, dump(config))
    shapes = []
    for batch in batches_by_size(data, lambda total: [0, total - 1]):
        rows, samples = batch.audio.shape
        shapes.append(f"{rows},{samples},{batch.labels.shape[1]}")
    line = [sys.executable, "-m", "tools.rehearsal.fake_step", str(path), *shapes]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    process = subprocess.run(line, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["the fake device: no output"]
        raise MachineError(lines[-1])
    return process.stdout.strip()


def count_graphs_of_steps(config: DictConfig, data: DataModule, device: Device, policy: ComputePolicy) -> str:
    """Return the graphs that ``torch.compile`` makes of the steps of the smallest shapes."""
    from tools.rehearsal.graph_count import count_graphs  # It imports torch's compiler, in 1 s.

    task, _ = build_task(run_config(config))
    apply_policy(task, policy)
    shapes = sorted(data.shapes(), key=lambda shape: shape[0] * shape[1])
    batches = []
    for shape in shapes[:_COUNTED_SHAPES]:
        batches.append(task.prepare(padding_batch(*shape), seed=0))
    count = count_graphs(task, policy, batches)
    count.check(operations_of(device).largest_graph)
    return str(count)


main = console(run)

if __name__ == "__main__":
    main()
