"""The planted faults of a review, with the outcome of the rehearsal for each on Gaudi and on CUDA.

``python tests/rehearsal/planted_faults.py`` plants one after the other into a copy of the source, rehearses a
small recipe for both devices, and prints a table. With names as arguments, it plants these.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_DATA = [
    *("data=digits", "data.workers=0", "data.train.utterances=64", "data.valid.unheard.utterances=2"),
    *("augment=specaugment", "augment.noise_db=[10,20]"),
]
RECIPES = {
    "rnnt": [
        *(*_DATA, "model=rnnt_small", "encoder.hidden=16", "model.prediction.hidden=16"),
        "model.joint.hidden=16",
    ],
    "wav2vec2": [
        *(*_DATA, "model=wav2vec2_small", "encoder.layers=1", "encoder.width=16", "encoder.heads=2"),
        *("encoder.feed_forward=16", "encoder.position_groups=2"),
    ],
}
"""Small recipes."""


@dataclass(frozen=True)
class Fault:
    """A line of the package, and the lines that replace it. The line with ``# planted`` is at fault."""

    name: str
    file: str
    line: str
    replacement: str
    model: str = "rnnt"  # the recipe
    # The outcome by device: ``named`` (red with file and line), ``red``, or why the device allows it.
    hpu: str = "named"
    cuda: str = "named"


_LEGAL = "legal, because a GPU computes it"
_LOCAL = "no host takes part, so it costs time only"

FAULTS = [
    Fault(
        "F1 int64 beyond 32 bits, only for a long recording",
        "features/logmel.py",
        "        lengths = (counts + self.splice - 1) // self.splice\n",
        "        counts = torch.div(counts * 6_400_000, 6_400_000, rounding_mode='floor')  # planted\n"
        "        lengths = (counts + self.splice - 1) // self.splice\n",
        cuda=f"{_LEGAL} in 64 bits",
    ),
    Fault(
        "F2 the host reads a length to cut",
        "encoders/lstm.py",
        "        x, lengths = self.augmented(batch)\n",
        "        x, lengths = self.augmented(batch)\n        x = x[:, : int(lengths.max())]  # planted\n",
    ),
    Fault(
        "F3 one_hot reads the maximum",
        "nn/quantizer.py",
        "        return (ids[..., None] == torch.arange(self.entries, device=ids.device)).to(like.dtype)\n",
        "        return nn.functional.one_hot(ids, self.entries).to(like.dtype)  # planted\n",
        model="wav2vec2",
    ),
    Fault(
        "F4 a constant in fp64",
        "losses/contrastive.py",
        "        is_same_code = _is_same_code(ids).to(scores.dtype)\n",
        "        is_same_code = _is_same_code(ids).to(scores.dtype)\n"
        "        scores = (scores * scores.new_ones(1, dtype=torch.float64)).float()  # planted\n",
        model="wav2vec2",
        cuda=f"{_LEGAL}, slowly",
    ),
    Fault(
        "F5 assignment by a boolean mask",
        "encoders/lstm.py",
        "        x, lengths = self.augmented(batch)\n",
        "        x, lengths = self.augmented(batch)\n"
        "        x = x.clone()\n        x[x == 0.5] = 0.0  # planted\n",
    ),
    Fault(
        "F6 a tensor of numpy in a device operation",
        "features/augment.py",
        "        is_valid = torch.arange(samples, device=audio.device) < lengths[:, None]\n",
        "        import numpy as np\n\n"
        "        is_valid = torch.from_numpy(np.arange(samples)) < lengths[:, None]  # planted\n",
    ),
    Fault(
        "F7 a tensor that is no buffer",
        "encoders/wav2vec2.py",
        "        x = self.input_dropout(self.projection(features))\n",
        "        self.table = getattr(self, 'table', None)\n"
        "        self.table = torch.ones(self.width) if self.table is None else self.table\n"
        "        x = self.input_dropout(self.projection(features)) * self.table  # planted\n",
        model="wav2vec2",
    ),
    Fault(
        "F8 transposed copies in attention",
        "nn/transformer.py",
        "        q, k, v = (projection.view(shape).transpose(1, 2) for projection in projections)\n",
        "        q, k, v = (p.view(shape).transpose(1, 2).contiguous() for p in projections)  # planted\n",
        model="wav2vec2",
        hpu=_LOCAL,
        cuda=_LOCAL,
    ),
    Fault(
        "F9 a write into a slice",
        "features/logmel.py",
        "            audio = audio.float()\n",
        "            audio = audio.float().clone()\n            audio[:, :1] = 0.0  # planted\n",
        hpu=_LOCAL,
        cuda=_LOCAL,
    ),
    Fault(
        "F10 torch.tensor with a device in the step",
        "features/logmel.py",
        "            audio = audio.float()\n",
        "            audio = audio.float() * torch.tensor(1.0, device=audio.device)  # planted\n",
    ),
    Fault(
        "F11 cdist",
        "losses/contrastive.py",
        "        is_same_code = _is_same_code(ids).to(scores.dtype)\n",
        "        is_same_code = _is_same_code(ids).to(scores.dtype)\n"
        "        scores = scores - torch.cdist(context, context)  # planted\n",
        model="wav2vec2",
        cuda=_LEGAL,
    ),
    Fault(
        "F12 a stable sort",
        "losses/contrastive.py",
        "        is_same_code = _is_same_code(ids).to(scores.dtype)\n",
        "        is_same_code = _is_same_code(ids).to(scores.dtype)\n"
        "        scores = scores + 0.0 * scores.sort(dim=2, stable=True).values  # planted\n",
        model="wav2vec2",
        cuda=_LEGAL,
    ),
    Fault(
        "F13 cumsum of booleans",
        "encoders/lstm.py",
        "        x, lengths = self.augmented(batch)\n",
        "        x, lengths = self.augmented(batch)\n        x = x + 0.0 * (x > 0).cumsum(1)  # planted\n",
        hpu="legal: the bridge casts booleans to int32 (FillCumSumProdSharedMeta)",
        cuda=_LEGAL,
    ),
    Fault(
        "F14 random numbers on the host",
        "features/specaugment.py",
        "    numbers = torch.rand(2, sizes.shape[0], masks, device=sizes.device)\n",
        "    numbers = torch.rand(2, sizes.shape[0], masks).to(sizes.device)  # planted\n",
    ),
    Fault(
        "F15 promotion to fp32 in the bf16 path",
        "nn/transformer.py",
        "        hidden = self.activation_dropout(F.gelu(self.feed_forward_in(x)))\n",
        "        hidden = self.activation_dropout(F.gelu(self.feed_forward_in(x).float()))  # planted\n",
        model="wav2vec2",
        hpu=_LOCAL,
        cuda=_LOCAL,
    ),
    Fault(
        "F16 a new shape in each step",
        "encoders/lstm.py",
        "        x, lengths = self.augmented(batch)\n",
        "        x, lengths = self.augmented(batch)\n"
        "        self.calls = getattr(self, 'calls', 0) + 1\n"
        "        x = x + 0.0 * x.new_zeros(self.calls).sum()  # planted\n",
        cuda=f"{_LEGAL}: shapes may vary",
    ),
    Fault(
        "F17 a needless synchronize in the trainer",
        "training/trainer.py",
        "            weights.append(loss.weight)\n",
        "            weights.append(loss.weight)\n            self.device.synchronize()  # planted\n",
    ),
    Fault(
        "F18 a number that changes in each step",
        "encoders/lstm.py",
        "        x, lengths = self.augmented(batch)\n",
        "        x, lengths = self.augmented(batch)\n"
        "        self.calls = getattr(self, 'calls', 0) + 1\n"
        "        x = x.masked_fill(x == 0.5, 1e-9 * self.calls)  # planted\n",
        cuda=f"{_LEGAL}: a launch has its numbers as arguments",
    ),
    Fault(
        "F19 the host reads in the optimizer step",
        "optim/optimizer_step.py",
        "        if self.clip <= 0:\n",
        "        scale = scale * (0.0 if float(norm) < 0 else 1.0)  # planted\n        if self.clip <= 0:\n",
    ),
    Fault(
        "F20 the host reads the loss for the metrics",
        "training/trainer.py",
        "            weights.append(loss.weight)\n",
        "            data_wait_s += 0.0 * loss.total.item()  # planted\n"
        "            weights.append(loss.weight)\n",
    ),
    Fault(
        "F23 in place on a broadcast view",
        "encoders/lstm.py",
        "        x, lengths = self.augmented(batch)\n",
        "        x, lengths = self.augmented(batch)\n"
        "        lengths[:, None].expand(-1, 2).add_(0)  # planted\n",
        hpu="red",
        cuda="red",
    ),
]


def plant(fault: Fault, folder: Path) -> tuple[Path, int]:
    """Return a copy of the package with the fault, and the number of the line that must be named."""
    for name in ("speechtrain", "conf", "launchers", "tools/rehearsal", "tests/rehearsal"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "speechtrain" / fault.file
    text = path.read_text()
    count = text.count(fault.line)
    assert count == 1, f"{fault.name}: {fault.file} has the line {count} times"
    text = text.replace(fault.line, fault.replacement)
    path.write_text(text)
    (number,) = [n for n, line in enumerate(text.splitlines(), 1) if "# planted" in line]
    return folder, number


def run_program(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python file of the package copy in ``folder``."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    line = [sys.executable, program, *arguments]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def outcomes(fault: Fault) -> dict[str, tuple[str, str]]:
    """Plant the fault. Return the outcome (``named``, ``red``, ``green``) and the error by device."""
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder, number = plant(fault, Path(name))
        for device in ("hpu", "cuda"):
            recipe = [*RECIPES[fault.model], f"device={device}"]
            process = run_program(folder, "tools/rehearsal/run.py", *recipe)
            outcome = "red" if process.returncode else "green"
            if re.search(rf"{re.escape(fault.file)}:{number}\b", process.stderr):
                outcome = "named"
            results[device] = (outcome, process.stderr[-2000:])
    return results


def agrees(expectation: str, outcome: str) -> bool:
    """Return whether the outcome is the expected one. A fault that a device allows is green."""
    if expectation in ("named", "red"):
        return outcome == expectation
    return outcome == "green"


def main(names: list[str]) -> int:
    """Print the table. Return 1 if an outcome is not the expected one."""
    is_as_expected = True
    print("| fault | hpu | cuda |\n|---|---|---|")
    for fault in FAULTS:
        number = fault.name.partition(" ")[0]
        if names and number not in names:
            continue
        cells = []
        for device, (outcome, text) in outcomes(fault).items():
            expectation = getattr(fault, device)
            is_allowed = expectation not in ("named", "red")
            cells.append(expectation if is_allowed and outcome == "green" else outcome)
            if not agrees(expectation, outcome):
                is_as_expected = False
                print(f"{fault.name}, {device}: {outcome} {text}", file=sys.stderr, flush=True)
        print(f"| {fault.name} | {' | '.join(cells)} |", flush=True)
    return 0 if is_as_expected else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
