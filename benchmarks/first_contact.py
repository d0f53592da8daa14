"""The first ten minutes on real hardware: each probe of a device, measured and written down.

    python benchmarks/first_contact.py device=cuda      # or device=hpu, with other KEY=VALUE

It writes first-contact-DEVICE.json and .md here. Every probe runs, also after one that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import pickletools
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
from speechtrain.devices.recorder import Recorder
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
        """The chip, packages and variables, and what importing the vendor's library changed in torch."""
        names = (
            "torch",
            "habana-torch-plugin",
            "habana-torch-dataloader",
            "nvidia-cudnn-cu12",
            "speechtrain",
        )
        found = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
        path = self.folder / "plain.pt"
        torch.save({"one": torch.ones(1)}, path)
        with zipfile.ZipFile(path) as archive:
            content = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
        protocol = next(code[1] for code in pickletools.genops(content) if code[0].name == "PROTO")
        prefixes = ("PT_", "HABANA_", "HLS_", "CUDA_", "NCCL_", "HCCL_", "TORCH_", "OMP_")
        return {
            "chip": self.device.chip(),
            "packages": {name: found[name] for name in names if name in found},
            "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(prefixes)},
            "pickle protocol of torch.save": protocol,
            "policy": self.device.policy(torch.float32).record(),
        }

    def int64(self) -> Values:
        """Whether int64 has 64 bits: the copy of a large value, and a product beyond 32 bits."""
        copied = self._held(lambda: int(self._on(torch.tensor([2**40])).cpu()[0]))
        product = self._held(lambda: int((self._on(torch.tensor([2**20])) * 2**20).cpu()[0]))
        return {"copy of 2**40": copied, "2**20 * 2**20": product}

    def transducer(self) -> Values:
        """The loss with dropout, here and on the CPU: the same hash drops the same units."""
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
        """Whether a tensor of the device is read again in a plain torch on the host."""
        path = self.folder / "held.pt"
        torch.save({"weight": self._on(torch.ones(3)).cpu()}, path, pickle_protocol=2)
        plain = "import sys, torch; print(torch.load(sys.argv[1], weights_only=True)['weight'].sum().item())"
        environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        command = [sys.executable, "-c", plain, str(path)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
        return {"read": done.stdout.strip() == "3.0", "said": one_line(done.stderr[-300:])}

    def no_memory(self) -> Values:
        """The text of an allocator that has too little memory, and whether we know it."""
        try:
            torch.empty(2**50, dtype=torch.uint8, device=self.device.name).fill_(1)  # no chip has a PiB
            self.device.synchronize()
        except Exception as error:  # whatever the vendor raises
            known = self.device.explain(error, None, Footprint(0.0)) is not None
            return {"known": known, "type": type(error).__name__, "text": one_line(str(error), 300)}
        return {"known": False, "text": "a PiB was given"}

    # --- what they share ----------------------------------------------------------------------------

    def _on(self, tensor: Tensor) -> Tensor:
        return self.device.tensor(tensor)

    @staticmethod
    def _held(read: Callable[[], int]) -> int | str:
        try:
            return read()
        except Exception as error:  # its text is the finding
            return one_line(f"{type(error).__name__}: {error}", 300)

    def _difference(self, loss: Callable[[Callable[[Tensor], Tensor], ComputePolicy], Tensor]) -> Values:
        mine = loss(self._on, self.device.policy(torch.float32)).detach().cpu()
        self.device.mark_step()
        theirs = loss(lambda tensor: tensor, ComputePolicy()).detach()
        return {"largest relative difference": float(((mine - theirs) / theirs).abs().max())}

    def _timed(self, step: Callable[[ComputePolicy], Callable[[], None]]) -> Values:
        """Median seconds in the device's policy and in the plain one, in turn, and the launches of each."""
        policies = {"policy": self.device.policy(torch.float32), "plain": ComputePolicy()}
        found: Values = {}
        steps: dict[str, Callable[[], None]] = {}
        for name, policy in policies.items():
            try:
                steps[name] = step(self.device.attach(policy))
                steps[name]()
                recorder = Recorder(replace(self.device.facts.operations, records=False, known=frozenset()))
                with recorder:
                    steps[name]()
                found |= {
                    f"{name}: launches": recorder.costs.launches,
                    f"{name}: reads": recorder.costs.reads,
                }
            except Exception as error:  # the plain form need not run here
                steps.pop(name, None)
                found[name] = one_line(f"{type(error).__name__}: {error}", 300)
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(_ROUNDS):
            for name, run in steps.items():
                self.device.synchronize()
                begun = time.perf_counter()
                run()
                self.device.synchronize()
                taken[name].append(time.perf_counter() - begun)
        return found | {f"{name}: seconds": sorted(times)[_ROUNDS // 2] for name, times in taken.items()}

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
        batch = self.device.move(task.prepare(replace(padding_batch(4, 64000, 1), weight=torch.ones(4)), 3))
        task.to(batch.audio.device).train()
        return lambda: task(batch).total.backward()

    def _device_override(self) -> list[str]:
        return [override for override in self.overrides if override.partition(".")[0].startswith("device")]

    def _trained(self, name: str, *overrides: str) -> Values:
        """The demo's recipe on this device, as a user would start it."""
        run_dir, typed = self.folder / name, {override.partition("=")[0] for override in self.overrides}
        command = [sys.executable, "-m", "speechtrain.commands.train", "recipe=demo", f"run_dir={run_dir}"]
        begun = time.perf_counter()
        done = subprocess.run(
            [*command, *self.overrides, *(o for o in overrides if o.partition("=")[0] not in typed)],
            capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        said = (done.stderr or done.stdout).strip().splitlines()[-1:]
        found: Values = {"exit code": done.returncode, "seconds": time.perf_counter() - begun}
        if (result := read_result(run_dir)) is not None:
            return found | {"status": result.status, "steps": result.steps, "metrics": result.metrics}
        return found | {"said": one_line(" ".join(said), 300)}


def _transducer(
    move: Callable[[Tensor], Tensor], policy: ComputePolicy, *, rows: int, frames: int, labels: int
) -> Tensor:
    torch.manual_seed(0)
    sides = torch.randn(rows, frames, 128), torch.randn(rows, labels + 1, 128)
    joint = nn.Linear(128, 64)
    given = [move(tensor.detach()).requires_grad_() for tensor in (*sides, joint.weight, joint.bias)]
    lengths = torch.full((rows,), frames), torch.full((rows,), labels)
    texts = [move(tensor) for tensor in (torch.randint(0, 63, (rows, labels)), *lengths)]
    return transducer_loss(
        *given, *texts, blank=63, dropout=0.3, seed=7, static=policy.transducer == "static",
        chunk=policy.lattice_cells, keep=policy.logit_bytes,
    )  # fmt: skip


def first_contact(config: DictConfig, overrides: list[str]) -> tuple[Path, list[tuple[str, Values]]]:
    """Probe the device of ``config``; return the JSON file, beside which is a page, and what was found."""
    device = build_device(config)
    device.check(1)
    device.open(0)
    found: list[tuple[str, Values]] = []
    with tempfile.TemporaryDirectory(prefix="speechtrain-") as folder:
        for name, probe in Contact(device, config, overrides, Path(folder)).probes():
            begun = time.perf_counter()
            try:
                values = probe()
            except Exception as error:  # what it met is what the program is for
                values = {"error": one_line(f"{type(error).__name__}: {error}", 300)}
            found.append((name, values | {"took": time.perf_counter() - begun}))
    stem = Path(f"{NAME}-{config.device._target_.rpartition('.')[2].lower()}")
    when = datetime.now(UTC).isoformat(timespec="seconds")
    path = stem.with_suffix(".json")
    write_json(path, {"when": when, "overrides": overrides, "probes": dict(found)})
    lines = [f"# First contact: {' '.join(overrides)}", "", when, "", "| probe | found |", "|---|---|"]
    lines += [
        f"| {name} | {one_line(json.dumps(values), 2000).replace('|', '/')} |" for name, values in found
    ]
    write_text(stem.with_suffix(".md"), "\n".join([*lines, ""]))
    return path, found


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
