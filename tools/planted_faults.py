"""Plants one fault of one line at a time, and says whether a suite of tests finds it.

    git clone . ../faults && cd ../faults && make setup-dev
    .venv/bin/python tools/planted_faults.py                     # each fault, with `make test`
    .venv/bin/python tools/planted_faults.py --suite test-all    # with `make test-all`
    .venv/bin/python tools/planted_faults.py clip tests/unit     # the fault `clip`, with a part of the tests

The tests run in the checkout of this file, which must have no uncommitted changes. Each fault is removed
afterwards. A suite ends at its first failure, so a fault that is found takes less time than the suite.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST_ARGS = "-x -n auto --dist loadfile --no-loadscope-reorder"


@dataclass(frozen=True)
class Fault:
    """A part of one line of the package, and the text that replaces it."""

    name: str
    file: str  # below speechtrain/
    text: str
    replacement: str


FAULTS = (
    Fault("clip", "optim/optimizer_step.py", "norm.clamp(min=self.clip)", "norm.clamp(max=self.clip)"),
    Fault("draws-of-ranks", "training/trainer.py", "index * world.size + world.rank", "index * world.size"),
    Fault(
        "no-sync",
        "training/trainer.py",
        "is_last = index + 1 == self.config.accumulate",
        "is_last = index == 0",
    ),
    Fault("last-save", "training/trainer.py", "is_save_step or status is not None", "is_save_step"),
    Fault("temperature", "losses/contrastive.py", "_unit(context) / temperature", "_unit(context)"),
    Fault("arcs", "losses/transducer_frames.py", "F.pad(label, (1, -1))", "label"),
    Fault("dropout", "losses/transducer_lattice.py", "65536 / (65536 - self.dropped_numbers)", "1.0"),
    Fault("ranks", "data/sampler.py", "self.advance(epoch, position, rank)", "epoch, position"),
    Fault("speeds", "data/sampler.py", "(fastest - slowest + 1)", "(fastest - slowest)"),
    Fault("pieces", "data/pieces.py", "start += end / self.sample_rate", "start += max_seconds"),
    Fault("noise", "data/acoustics.py", "snr=decibels", "snr=-decibels"),
    Fault("digest", "checkpoint/checkpointer.py", "if digest != stored_digest:", "if not digest:"),
    Fault("best", "checkpoint/checkpointer.py", "if folder != best and", "if"),
    Fault("selection", "checkpoint/best_metric.py", "value, -math.inf, loss", "loss, -math.inf, loss"),
    Fault(
        "state-on-blank",
        "decoding/greedy.py",
        "torch.where(emits[:, None], prediction, self.prediction)",
        "prediction",
    ),
    Fault("merit", "decoding/beam.py", "hypothesis.score / (len(hypothesis.labels) + 1)", "hypothesis.score"),
    Fault("end", "decoding/fusion.py", "self.model.score(self._next_context(index), END)", "0.0"),
    Fault("changed-key", "start/resume.py", "not in (value, with_absolute_path(value))", "is None"),
    Fault("failed-jobs", "start/sweep.py", "if job_result.exit_code]", "if job_result.exit_code > 100]"),
    Fault("accumulate", "start/resume.py", "= micro_batches // world_size", "= micro_batches"),
)


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("words", nargs="*", help="names of faults, and paths of tests")
    parser.add_argument("--suite", default="test", help="a target of the Makefile")
    options = parser.parse_args()
    if subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT).returncode:
        sys.exit("planted_faults: the checkout has uncommitted changes. Commit them, or use a clone")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # The fault is then removed.
    by_name = {fault.name: fault for fault in FAULTS}
    tests = [word for word in options.words if word not in by_name]
    unknown = [word for word in tests if not (ROOT / word.partition("::")[0]).exists()]
    if unknown:
        sys.exit(f"planted_faults: {unknown[0]} is neither a fault nor a file. Faults: {', '.join(by_name)}")
    chosen = [fault for fault in FAULTS if fault.name in options.words] or FAULTS
    missed = []
    for fault in chosen:
        failure = first_failure(fault, options.suite, tests)
        print(f"{fault.name:<16} {fault.file:<34} {failure or 'NOT FOUND'}", flush=True)
        if not failure:
            missed.append(fault)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults found by make {options.suite}")
    return 1 if missed else 0


def first_failure(fault: Fault, suite: str, tests: list[str]) -> str:
    """Return the name of the first test that fails with ``fault``, or an empty text if all pass."""
    path = ROOT / "speechtrain" / fault.file
    source = path.read_text(encoding="utf-8")
    count = source.count(fault.text)
    if count != 1:
        sys.exit(
            f"planted_faults: {fault.file} has {fault.text!r} {count} times. Correct the fault {fault.name}"
        )
    command = ["make", suite, f"PYTEST_ARGS={' '.join([PYTEST_ARGS, *tests])}"]
    try:
        path.write_text(source.replace(fault.text, fault.replacement), encoding="utf-8")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    finally:
        path.write_text(source, encoding="utf-8")
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failures:
        return failures[0]
    if done.returncode:
        sys.exit(f"planted_faults: make {suite} ended without a failed test:\n{done.stdout}{done.stderr}")
    return ""


if __name__ == "__main__":
    sys.exit(main())
