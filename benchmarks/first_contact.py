"""The first ten minutes on real hardware: each probe of a device, measured and written down.

    python benchmarks/first_contact.py device=cuda      # or device=hpu, with other KEY=VALUE

The program writes first-contact-DEVICE.json and .md into the current folder. Every probe runs, even if an
earlier one has failed.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from speechtrain.batch import Footprint
from speechtrain.compute_policy import ComputePolicy, apply_policy
from speechtrain.config.build import build_device, build_encoder, build_model, build_tokenizer
from speechtrain.devices.base import Device
from speechtrain.devices.recorder import Costs, Recorder
from speechtrain.errors import one_line
from speechtrain.files import write_json, write_text
from speechtrain.losses.ctc import ctc_loss
from speechtrain.losses.transducer import transducer_loss
from speechtrain.nn.lstm import LSTM
from speechtrain.run_directory import read_result
from speechtrain.runs.compose import compose
from speechtrain.training.graph_warmup import padding_batch

NAME = "first-contact"
_ROUNDS = 5
Values = dict[str, Any]


@dataclass
class Contact:
    """The probes of one opened device, in the order of their cost."""

    device: Device
    config: DictConfig
    overrides: list[str]
    folder: Path

    def probes(self) -> Iterator[tuple[str, Callable[[], Values]]]:
        for probe in (self.versions, self.int64, self.transducer, self.ctc, self.checkpoint, self.no_memory):
            yield probe.__name__, probe
        yield "time of the transducer loss", lambda: self._timed(self._loss_step)
        yield "time of an LSTM", lambda: self._timed(self._lstm_step)
        yield "time of a wav2vec 2.0 step", lambda: self._timed(self._wav2vec2_step)
        yield "two ranks", lambda: self._trained("ranks", "world_size=2", "trainer.max_steps=4")
        yield "recipe=demo", lambda: self._trained("demo")

    def versions(self) -> Values:
        """Return the chip, packages and variables, and the changes of torch by the vendor's library."""
        names = (
            "torch",
            "habana-torch-plugin",
            "habana-torch-dataloader",
            "nvidia-cudnn-cu12",
            "speechtrain",
        )
        versions = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
        prefixes = ("PT_", "HABANA_", "HLS_", "CUDA_", "NCCL_", "HCCL_", "TORCH_", "OMP_")
        return {
            "chip": self.device.chip(),
            "packages": {name: versions[name] for name in names if name in versions},
            "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(prefixes)},
            "pickle protocol of torch.save": self._pickle_protocol(),
            "policy": self.device.policy(torch.float32).record(),
        }

    def _pickle_protocol(self) -> int:
        path = self.folder / "host.pt"
        torch.save({"weight": torch.ones(1)}, path)
        with zipfile.ZipFile(path) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
            pickled = archive.read(name)
        _, protocol, _ = next(pickletools.genops(pickled))  # The first operation is PROTO.
        return int(protocol)

    def int64(self) -> Values:
        """Check whether int64 has 64 bits: return the copy of a large value, and a product beyond 32 bits."""
        copy = self._integer(lambda: self._on(torch.tensor([2**40])))
        factor = torch.tensor([2**20])
        product = self._integer(lambda: self._on(factor) * 2**20)
        return {"copy of 2**40": copy, "2**20 * 2**20": product}

    def transducer(self) -> Values:
        """Compare the loss with dropout to the CPU, where the same hash drops the same units."""
        return self._difference(lambda move, policy: _transducer(move, policy, rows=2, frames=20, labels=6))

    def ctc(self) -> Values:
        def loss(move: Callable[[Tensor], Tensor], policy: ComputePolicy) -> Tensor:
            torch.manual_seed(1)
            scores, labels = torch.randn(2, 30, 9), torch.randint(1, 9, (2, 6))
            scores, labels = move(scores).log_softmax(-1), move(labels)
            lengths, symbols = move(torch.tensor([30, 25])), move(torch.tensor([6, 4]))
            return ctc_loss(scores, labels, lengths, symbols, blank=0, policy=policy)

        return self._difference(loss)

    def checkpoint(self) -> Values:
        """Check whether torch on the host, without the vendor's library, reads a tensor of the device."""
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
        """Return the error of an allocation that is too large, and whether the device class knows it."""
        try:
            torch.empty(2**50, dtype=torch.uint8, device=self.device.name).fill_(1)  # No chip has a PiB.
            self.device.synchronize()
        except Exception as error:  # The class of the error depends on the vendor.
            is_known = self.device.explain(error, None, Footprint(0.0)) is not None
            return {"known": is_known, "type": type(error).__name__, "text": one_line(str(error), 300)}
        return {"known": False, "text": "a PiB was allocated"}

    # --- Functions of several probes ----------------------------------------------------------------

    def _on(self, tensor: Tensor) -> Tensor:
        return self.device.tensor(tensor)

    @staticmethod
    def _integer(compute: Callable[[], Tensor]) -> int | str:
        """Return the first integer of a tensor, or the text of the error."""
        try:
            return int(compute().cpu()[0])
        except Exception as error:
            return one_line(f"{type(error).__name__}: {error}", 300)

    def _difference(self, loss: Callable[[Callable[[Tensor], Tensor], ComputePolicy], Tensor]) -> Values:
        """Return the largest relative difference between a loss of the device and of the CPU."""
        device_loss = loss(self._on, self.device.policy(torch.float32)).detach().cpu()
        self.device.mark_step()
        host_loss = loss(lambda tensor: tensor, ComputePolicy()).detach()
        differences = (device_loss - host_loss) / host_loss
        return {"largest relative difference": float(differences.abs().max())}

    def _timed(self, make_step: Callable[[ComputePolicy], Callable[[], None]]) -> Values:
        """Return the launches, reads and seconds of a step by the device's policy and by the default one."""
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
        recorder = Recorder(replace(self.device.facts.operations, records=False, known=frozenset()))
        with recorder:
            step()
        return recorder.costs

    def _median_seconds(self, steps: dict[str, Callable[[], None]]) -> dict[str, float]:
        """Time the steps in turn."""
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
        lstm, x = LSTM(240, 512, 2), self._on(torch.randn(8, 200, 240))
        apply_policy(lstm, policy)
        lstm.to(x.device)
        return lambda: lstm(x)[0].square().sum().backward()

    def _wav2vec2_step(self, policy: ComputePolicy) -> Callable[[], None]:
        config = compose(["model=wav2vec2_small", *self._device_override()])
        task: Any = build_model(config, build_tokenizer(config), build_encoder(config))
        apply_policy(task, policy)
        batch = replace(padding_batch(4, 64000, 1), weight=torch.ones(4))
        batch = self.device.move(task.prepare(batch, 3))
        task.to(batch.audio.device).train()
        return lambda: task(batch).total.backward()

    def _device_override(self) -> list[str]:
        return [override for override in self.overrides if override.partition(".")[0].startswith("device")]

    def _trained(self, name: str, *defaults: str) -> Values:
        """Train recipe=demo by the console command. An override of the user replaces its default."""
        run_dir = self.folder / name
        command = [sys.executable, "-m", "speechtrain.commands.train", "recipe=demo", f"run_dir={run_dir}"]
        command += self.overrides
        explicit_keys = {override.partition("=")[0] for override in self.overrides}
        for override in defaults:
            if override.partition("=")[0] not in explicit_keys:
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


def _transducer(
    move: Callable[[Tensor], Tensor], policy: ComputePolicy, *, rows: int, frames: int, labels: int
) -> Tensor:
    torch.manual_seed(0)
    sides = torch.randn(rows, frames, 128), torch.randn(rows, labels + 1, 128)
    joint = nn.Linear(128, 64)
    inputs = [move(tensor.detach()).requires_grad_() for tensor in (*sides, joint.weight, joint.bias)]
    lengths = torch.full((rows,), frames), torch.full((rows,), labels)
    texts = [move(tensor) for tensor in (torch.randint(0, 63, (rows, labels)), *lengths)]
    return transducer_loss(
        *inputs, *texts, blank=63, dropout=0.3, seed=7, static=policy.transducer == "static",
        chunk=policy.lattice_cells, keep=policy.logit_bytes,
    )  # fmt: skip


def first_contact(config: DictConfig, overrides: list[str]) -> tuple[Path, list[tuple[str, Values]]]:
    """Probe the device of ``config``. Return the path of the JSON file and the values of the probes."""
    device = build_device(config)
    device.check(1)
    device.open(0)
    probes: list[tuple[str, Values]] = []
    with tempfile.TemporaryDirectory(prefix="speechtrain-") as folder:
        for name, probe in Contact(device, config, overrides, Path(folder)).probes():
            start = time.perf_counter()
            try:
                values = probe()
            except Exception as error:  # The error is the result of the probe.
                values = {"error": one_line(f"{type(error).__name__}: {error}", 300)}
            probes.append((name, values | {"took": time.perf_counter() - start}))
    device_class = config.device._target_.rpartition(".")[2]
    path = Path(f"{NAME}-{device_class.lower()}.json")
    when = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(path, {"when": when, "overrides": overrides, "probes": dict(probes)})
    write_text(path.with_suffix(".md"), page(when, overrides, probes))
    return path, probes


def page(when: str, overrides: list[str], probes: list[tuple[str, Values]]) -> str:
    """Return the Markdown page of the probes."""
    lines = [f"# First contact: {' '.join(overrides)}", "", when, "", "| probe | found |", "|---|---|"]
    for name, values in probes:
        cell = one_line(json.dumps(values), 2000).replace("|", "/")
        lines.append(f"| {name} | {cell} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="+", metavar="KEY=VALUE")
    parser.add_argument("--config-dir", metavar="DIR", help="your own choices of the groups")
    options = parser.parse_args()
    config = compose(options.overrides, options.config_dir)
    device = build_device(config)
    device.check(1)
    variables = {name: value for name, value in device.environment(1).items() if name not in os.environ}
    if variables:  # The device's libraries read them before Python starts.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **variables})
    path, probes = first_contact(config, options.overrides)
    failures = 0
    for name, values in probes:
        state = "green"
        if "error" in values or values.get("exit code", 0):
            state = "red"
            failures += 1
        facts = "  ".join(f"{key}: {value}" for key, value in values.items())
        print(f"{state:<5}  {name:<13} {one_line(facts, 300)}")
    print(f"written: {path} and {path.with_suffix('.md')}; please send both to us")
    sys.exit(min(1, failures))


if __name__ == "__main__":
    main()
