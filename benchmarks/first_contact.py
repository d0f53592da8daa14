"""The first ten minutes on real hardware: run a list of checks (probes) on a device, and write the results.

    python benchmarks/first_contact.py device=cuda      # or device=hpu, with other KEY=VALUE

The program writes first-contact-DEVICE.json and .md into the current folder after each probe. Each probe runs
in its own process, so a crash loses no result. The program itself does not open the device, because only one
process at a time can open a Gaudi card, and the probes need it.
"""

from __future__ import annotations

import argparse
import json
import os
import pickletools
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from speechtrain.batch import Footprint
from speechtrain.compute_policy import ComputePolicy, apply_policy
from speechtrain.devices.base import Device
from speechtrain.devices.out_of_memory import out_of_memory_error
from speechtrain.errors import one_line
from speechtrain.files import write_json, write_text
from speechtrain.losses.ctc import ctc_loss
from speechtrain.losses.transducer import transducer_loss
from speechtrain.nn.lstm import LSTM
from speechtrain.run_directory import read_result
from speechtrain.start.build import build_encoder, build_model
from speechtrain.start.compose import compose
from speechtrain.start.run_config import part_of, run_config
from speechtrain.training.graph_warmup import padding_batch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.rehearsal.operations import operations_of
from tools.rehearsal.recorder import Costs, Recorder

NAME = "first-contact"
_ROUNDS = 5  # of timing
_MULTIPLIER = 0x846CA68B - 2**32  # of the hash of dropout (losses/transducer_dropout.py)
_PROBE_SECONDS = 1200.0  # the time limit of a probe
_TRAININGS = ("two ranks", "recipe=demo")  # These probes start further processes, which open the device.
Values = dict[str, Any]
"""The results of a probe, by name."""
Move = Callable[[Tensor], Tensor]
"""A function that returns a tensor on a device."""


@dataclass
class Contact:
    """The probes of one device."""

    device: Device
    config: DictConfig
    overrides: list[str]
    folder: Path  # for temporary files

    def probes(self) -> dict[str, Callable[[], Values]]:
        """Return the probes by name, in the order of their cost. The last one may end its process."""
        return {
            "versions": self.versions,
            "int64": self.int64,
            "transducer": self.transducer,
            "ctc": self.ctc,
            "checkpoint": self.checkpoint,
            "time of the transducer loss": lambda: self._timed(self._loss_step),
            "time of an LSTM": lambda: self._timed(self._lstm_step),
            "time of a wav2vec 2.0 step": lambda: self._timed(self._wav2vec2_step),
            "two ranks": lambda: self._trained("ranks", "world_size=2", "trainer.max_steps=4"),
            "recipe=demo": lambda: self._trained("demo"),
            "no_memory": self.no_memory,
        }

    def probe(self, name: str) -> Values:
        """Return the results of one probe and the seconds that it took. If it raises, return the error."""
        start = time.perf_counter()
        try:
            if name not in _TRAININGS:
                self.device.open(0)
            values = self.probes()[name]()
        except Exception as error:
            values = {"error": one_line(f"{type(error).__name__}: {error}", 300)}
        return values | {"took": time.perf_counter() - start}

    def versions(self) -> Values:
        """Return the chip, packages and variables, and the changes of torch by the vendor's library."""
        package_names = (
            "torch",
            "habana-torch-plugin",
            "habana-torch-dataloader",
            "nvidia-cudnn-cu12",
            "speechtrain",
        )
        versions = {package.metadata["Name"]: package.version for package in metadata.distributions()}
        prefixes = ("PT_", "HABANA_", "HLS_", "CUDA_", "NCCL_", "HCCL_", "TORCH_", "OMP_")
        variables = {}
        for name, value in sorted(os.environ.items()):
            if name.startswith(prefixes):
                variables[name] = value
        return {
            "chip": self.device.chip(),
            "packages": {name: versions[name] for name in package_names if name in versions},
            "variables": variables,
            "pickle protocol of torch.save": self._pickle_protocol(),
            "policy": self.device.policy(torch.float32).record(),
        }

    def _pickle_protocol(self) -> int:
        """Return the pickle protocol of ``torch.save``. Importing Gaudi's library changes its default."""
        path = self.folder / "host.pt"
        torch.save({"weight": torch.ones(1)}, path)
        with zipfile.ZipFile(path) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
            pickled = archive.read(name)
        _, protocol, _ = next(pickletools.genops(pickled))  # The first operation is PROTO.
        return int(protocol)

    def int64(self) -> Values:
        """Return a copied value and a product beyond 32 bits. They are correct if int64 has 64 bits.

        The hash of dropout needs a product of int32 that keeps its lower 32 bits.
        """
        copy = self._integer(lambda: self._on(torch.tensor([2**40])))
        factor = torch.tensor([2**20])
        product = self._integer(lambda: self._on(factor) * 2**20)
        word = torch.tensor([0x7FEB352D], dtype=torch.int32)
        host_product = self._integer(lambda: word * _MULTIPLIER)
        device_product = self._integer(lambda: self._on(word) * _MULTIPLIER)
        values = {"copy of 2**40": copy, "2**20 * 2**20": product}
        return values | {"int32 product": device_product, "int32 product on the CPU": host_product}

    def transducer(self) -> Values:
        """Compare the loss with dropout to the CPU, where the same hash drops the same units."""
        return self._difference(lambda move, policy: _transducer(move, policy, rows=2, frames=20, labels=6))

    def ctc(self) -> Values:
        """Compare the CTC loss to the CPU."""

        def loss(move: Move, policy: ComputePolicy) -> Tensor:
            torch.manual_seed(1)
            logits = move(torch.randn(2, 30, 9))
            labels = move(torch.randint(1, 9, (2, 6)))
            frame_counts = move(torch.tensor([30, 25]))
            label_counts = move(torch.tensor([6, 4]))
            log_probabilities = logits.log_softmax(-1)
            return ctc_loss(log_probabilities, labels, frame_counts, label_counts, blank=0, policy=policy)

        return self._difference(loss)

    def checkpoint(self) -> Values:
        """Return whether torch without the vendor's library can read a saved tensor of the device."""
        path = self.folder / "held.pt"
        torch.save({"weight": self._on(torch.ones(3)).cpu()}, path, pickle_protocol=2)
        program = (
            "import sys, torch; print(torch.load(sys.argv[1], weights_only=True)['weight'].sum().item())"
        )
        environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        command = [sys.executable, "-c", program, str(path)]
        process = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=300, check=False
        )
        return {"read": process.stdout.strip() == "3.0", "said": one_line(process.stderr[-300:])}

    def no_memory(self) -> Values:
        """Return the error of an allocation that is too large, and whether it is recognised as such."""
        try:
            torch.empty(2**50, dtype=torch.uint8, device=self.device.name).fill_(1)  # No chip has a PiB.
            self.device.synchronize()
        except Exception as error:  # The class of the error depends on the vendor.
            is_known = out_of_memory_error(self.device, error, None, Footprint(0.0)) is not None
            return {"known": is_known, "type": type(error).__name__, "text": one_line(str(error), 300)}
        return {"known": False, "text": "a PiB was allocated"}

    # --- Functions of several probes ----------------------------------------------------------------

    def _on(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` on the device."""
        return self.device.tensor(tensor)

    @staticmethod
    def _integer(compute: Callable[[], Tensor]) -> int | str:
        """Return the first integer of a tensor, or the text of the error."""
        try:
            return int(compute().cpu()[0])
        except Exception as error:
            return one_line(f"{type(error).__name__}: {error}", 300)

    def _difference(self, loss: Callable[[Move, ComputePolicy], Tensor]) -> Values:
        """Return the largest relative difference of ``loss`` between the device and the CPU."""
        device_loss = loss(self._on, self.device.policy(torch.float32)).detach().cpu()
        self.device.mark_step()
        host_loss = loss(lambda tensor: tensor, ComputePolicy()).detach()
        differences = (device_loss - host_loss) / host_loss
        return {"largest relative difference": float(differences.abs().max())}

    def _timed(self, make_step: Callable[[ComputePolicy], Callable[[], None]]) -> Values:
        """Return the launches, reads and seconds of a step, by the device's policy and the default policy.

        ``make_step`` returns the step that computes with a policy.
        """
        policies = {"policy": self.device.policy(torch.float32), "plain": ComputePolicy()}
        values: Values = {}
        steps: dict[str, Callable[[], None]] = {}
        for name, policy in policies.items():
            try:
                step = make_step(self.device.attach(policy))
                step()
                costs = self._costs(step)
            except Exception as error:  # The default policy may not run on this device.
                values[name] = one_line(f"{type(error).__name__}: {error}", 300)
                continue
            steps[name] = step
            values |= {f"{name}: launches": costs.launches, f"{name}: reads": costs.reads}
        for name, seconds in self._median_seconds(steps).items():
            values[f"{name}: seconds"] = seconds
        return values

    def _costs(self, step: Callable[[], None]) -> Costs:
        """Return the launches and reads of a step. The recorder refuses no operation here."""
        operations = replace(operations_of(self.device), records=False, names=frozenset())
        recorder = Recorder(operations)
        with recorder:
            step()
        return recorder.costs

    def _median_seconds(self, steps: dict[str, Callable[[], None]]) -> dict[str, float]:
        """Return the median seconds of each step. The steps are timed in turn."""
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(_ROUNDS):
            for name, step in steps.items():
                self.device.synchronize()
                start = time.perf_counter()
                step()
                self.device.synchronize()
                times[name].append(time.perf_counter() - start)
        return {name: statistics.median(seconds) for name, seconds in times.items()}

    def _loss_step(self, policy: ComputePolicy) -> Callable[[], None]:
        return lambda: torch.autograd.backward(
            _transducer(self._on, policy, rows=8, frames=200, labels=40).sum()
        )

    def _lstm_step(self, policy: ComputePolicy) -> Callable[[], None]:
        lstm = LSTM(240, 512, 2)
        inputs = self._on(torch.randn(8, 200, 240))
        apply_policy(lstm, policy)
        lstm.to(inputs.device)

        def step() -> None:
            outputs, _ = lstm(inputs)
            outputs.square().sum().backward()

        return step

    def _wav2vec2_step(self, policy: ComputePolicy) -> Callable[[], None]:
        config = compose(["model=wav2vec2_small", *self._device_override()])
        task: Any = build_model(
            run_config(config), part_of(config, "tokenizer").build(), build_encoder(run_config(config))
        )
        apply_policy(task, policy)
        batch = replace(padding_batch(4, 64000, 1), weight=torch.ones(4))
        batch = self.device.move(task.prepare(batch, 3))
        task.to(batch.audio.device).train()
        return lambda: task(batch).total.backward()

    def _device_override(self) -> list[str]:
        return [override for override in self.overrides if override.partition(".")[0].startswith("device")]

    def _trained(self, name: str, *defaults: str) -> Values:
        """Train recipe=demo by the console command, and return its exit code, seconds and metrics.

        ``defaults`` are overrides, unless the user has set the same key.
        """
        run_dir = self.folder / name
        command = [sys.executable, "-m", "speechtrain.commands.train", "recipe=demo", f"run_dir={run_dir}"]
        command += self.overrides
        explicit_keys = {override.partition("=")[0] for override in self.overrides}
        for override in defaults:
            key, _, _ = override.partition("=")
            if key not in explicit_keys:
                command.append(override)
        start = time.perf_counter()
        process = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        values: Values = {"exit code": process.returncode, "seconds": time.perf_counter() - start}
        result = read_result(run_dir)
        if result is not None:
            return values | {"status": result.status, "steps": result.steps, "metrics": result.metrics}
        output = process.stderr or process.stdout
        last_line = output.strip().splitlines()[-1:]
        return values | {"said": one_line(" ".join(last_line), 300)}


def _transducer(move: Move, policy: ComputePolicy, *, rows: int, frames: int, labels: int) -> Tensor:
    """Return the transducer loss of random inputs, (rows,), with 63 labels and the blank."""
    torch.manual_seed(0)
    encoded = torch.randn(rows, frames, 128)
    predicted = torch.randn(rows, labels + 1, 128)
    joint = nn.Linear(128, 64)
    inputs = []
    for tensor in (encoded, predicted, joint.weight, joint.bias):
        inputs.append(move(tensor.detach()).requires_grad_())
    texts = move(torch.randint(0, 63, (rows, labels)))
    frame_counts = move(torch.full((rows,), frames))
    label_counts = move(torch.full((rows,), labels))
    return transducer_loss(
        *inputs, texts, frame_counts, label_counts, blank=63, dropout=0.3, seed=7,
        static=policy.transducer == "static", chunk=policy.lattice_cells, keep=policy.logit_bytes,
    )  # fmt: skip


def first_contact(
    config: DictConfig, overrides: list[str], names: list[str], run_probe: Callable[[str], Values]
) -> tuple[Path, dict[str, Values]]:
    """Run the probes ``names``. Return the path of the JSON file and the values of each probe.

    Both files are written again after each probe, so a job that ends early keeps its results.
    """
    device_class = config.device._target_.rpartition(".")[2]
    path = Path(f"{NAME}-{device_class.lower()}.json")
    when = datetime.now(UTC).isoformat(timespec="seconds")
    probes: dict[str, Values] = {}
    for name in names:
        probes[name] = run_probe(name)
        write_json(path, {"when": when, "overrides": overrides, "probes": probes})
        write_text(path.with_suffix(".md"), page(when, overrides, probes))
    return path, probes


def run_in_process(arguments: list[str], name: str) -> Values:
    """Run one probe in another process and return its results.

    If that process is killed or hangs, the result is an error.
    """
    with tempfile.TemporaryDirectory(prefix="speechtrain-") as folder:
        output = Path(folder) / "values.json"
        command = [sys.executable, __file__, *arguments, "--only", name, "--write", str(output)]
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no result after {_PROBE_SECONDS:.0f} s"}
        if output.exists():
            values: Values = json.loads(output.read_text())
            return values
        last_line = process.stderr.strip().splitlines()[-1:]
        return {"error": one_line(f"exit code {process.returncode}: {' '.join(last_line)}", 300)}


def page(when: str, overrides: list[str], probes: dict[str, Values]) -> str:
    """Return the results of the probes as a page in Markdown."""
    lines = [f"# First contact: {' '.join(overrides)}", "", when, "", "| probe | found |", "|---|---|"]
    for name, values in probes.items():
        cell = one_line(json.dumps(values), 2000).replace("|", "/")
        lines.append(f"| {name} | {cell} |")
    return "\n".join([*lines, ""])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="+", metavar="KEY=VALUE")
    parser.add_argument("--config-dir", metavar="DIR", help="your own choices of the groups")
    parser.add_argument("--only", action="append", metavar="PROBE", help="run this probe, and no other")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)  # the values of a probe in this process
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    config = compose(options.overrides, options.config_dir)
    device = part_of(config, "device").build()
    device.check(1)
    with tempfile.TemporaryDirectory(prefix="speechtrain-") as folder:
        contact = Contact(device, config, options.overrides, Path(folder))
        if options.write:  # This process was started by ``run_in_process``.
            write_json(options.write, contact.probe(options.only[0]))
            return
    # The processes of the probes inherit these variables. The device's libraries read them before Python
    # starts.
    for name, value in device.environment(1).items():
        os.environ.setdefault(name, value)
    arguments = [*options.overrides]
    if options.config_dir:
        arguments += ["--config-dir", options.config_dir]
    names = options.only or list(contact.probes())
    run_probe = partial(run_in_process, arguments)
    path, probes = first_contact(config, options.overrides, names, run_probe)
    failures = count_failures(probes)
    print(f"written: {path} and {path.with_suffix('.md')}; please send both to us")
    sys.exit(min(1, failures))


def count_failures(probes: dict[str, Values]) -> int:
    """Print a line for each probe. Return the number of probes that have failed."""
    failures = 0
    for name, values in probes.items():
        state = "green"
        if "error" in values or values.get("exit code", 0):
            state = "red"
            failures += 1
        facts = "  ".join(f"{key}: {value}" for key, value in values.items())
        print(f"{state:<5}  {name:<13} {one_line(facts, 300)}")
    return failures


if __name__ == "__main__":
    main()
