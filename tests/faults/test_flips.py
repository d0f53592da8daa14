"""Each bit of each small file of a run flipped, one at a time: named or of no consequence, never worse."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from speechtrain.checkpoint.checkpointer import Checkpointer
from speechtrain.commands import evaluate, prepare, report, train
from speechtrain.commands._cli import exit_code_of

from ..integration.conftest import TINY

EVERY = int(os.environ.get("SPEECHTRAIN_FLIPS", "233"))
"""One bit of so many is flipped; it is odd, so every bit of a byte has its turn."""
SMALLEST = 16384  # bytes; a larger file is one of weights, which has its sha256
PLAN = ["trainer.max_steps=4", "trainer.save_every=2", "trainer.validate_every=2", "data.max_seconds=3.5"]
READERS = {
    "config.yaml": "train evaluate report",
    "run.json": "train report",
    "result.json": "train report",
    "metrics.jsonl": "report",
    "device.json": "evaluate",
    "tokenizer.model": "evaluate",
    "skipped.jsonl": "report",
    "filtered.jsonl": "report",
    "best.json": "evaluate report",
    "checkpoint.json": "evaluate",
    "lock": "train",
    "output.log": "report",
    "recordings.bin": "train",
}
"""The commands that read a file; what a rank reads is tried with whole runs below."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run with every small file that there is; its ranks are not started again."""
    folder, here = tmp_path_factory.mktemp("flips"), str(Path(__file__).parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEECHTRAIN_CACHE", str(folder / "cache"))
        patch.setenv("SPEECHTRAIN_ALLOW_TARGETS", "parts")
        patch.syspath_prepend(here)
        patch.syspath_prepend(str(Path(here).with_name("integration")))
        model = folder / "t.model"
        assert prepare.run(["tokenizer", "--corpus", "digits", "--out", str(model), "--size", "24"]) == 0
        own = ("tokenizer=sentencepiece", f"tokenizer.model={model}", f"run_dir={folder / 'whole'}")
        assert train.run([*TINY, *PLAN, *own, "launcher=local"]) == 0
        model.unlink()
        found = folder / "whole"
        skip = '{"id": "train-00000", "reason": "missing", "detail": "the file does not exist"}\n'
        (found / "skipped.jsonl").write_text(skip)
        result = (found / "result.json").read_bytes()
        (found / "result.json").unlink()  # a finished run would not be started
        assert train.run([f"run_dir={found}", "launcher._target_=parts.Nothing"]) == 0
        (found / "result.json").write_bytes(result)
        yield found


class Flips:
    """A copy of a run, one bit of which is flipped at a time; commands read it in this process."""

    def __init__(self, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.run_dir = run_dir
        self.capsys = capsys
        self.sound = {
            path: path.read_bytes()
            for path in run_dir.rglob("*")
            if path.is_file() and path.stat().st_size < SMALLEST and path.parent.name != "parts"
        }  # Nobody reads the copies of own modules in parts/.
        self.best = Checkpointer(run_dir).best()[0]
        self.codes: Counter[str] = Counter()

    def restore(self) -> None:
        for path, content in self.sound.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)

    def command(self, name: str) -> tuple[int, str]:
        """Exit code and output of a command on the run."""
        run = {
            "train": lambda: train.run([f"run_dir={self.run_dir}"]),
            "evaluate": lambda: evaluate.run([str(self.run_dir)]),
            "report": lambda: report.run([str(self.run_dir), "--out", str(self.run_dir / "page.html")]),
        }[name]
        self.capsys.readouterr()
        code = exit_code_of(run)
        return code, "".join(self.capsys.readouterr())

    def flip(self, path: Path, place: int) -> None:
        damaged = bytearray(self.sound[path])
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)

    def try_all(self, path: Path, first: int) -> int:
        """Flip the file's bits, a share of them, and run what reads it; returns the number of cases."""
        places = range(first % EVERY, 8 * len(self.sound[path]), EVERY)
        for place in places:
            for name in READERS[path.name].split():
                if name == "report" and place % 4 and EVERY > 1:  # drawing a page takes 2 s
                    continue
                self.flip(path, place)
                code, said = self.command(name)
                self.codes[f"{name} {code}"] += 1
                line = self.sound[path][: place // 8].count(b"\n") + 1
                where = f"{path.relative_to(self.run_dir)}, line {line}, bit {place}: {name}: {said}"
                assert code in (0, 2, 3, 4, 5), where
                assert "Traceback" not in said, where
                assert self.best is None or self.best.is_dir(), where
                self.restore()
        return len(places)


@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_no_flipped_bit_is_an_internal_error_or_loses_a_checkpoint(
    whole: Path,
    tmp_path: Path,
    state: str,
    capsys: pytest.CaptureFixture[str],
    figures: Callable[[str], None],
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    if state == "unfinished":
        (tmp_path / "run" / "result.json").unlink()
    flips = Flips(tmp_path / "run", capsys)
    assert flips.best is not None
    assert {path.name for path in flips.sound} <= {*READERS, "stderr.log"}
    cases = sum(flips.try_all(path, number) for number, path in enumerate(sorted(flips.sound)))
    told = ", ".join(f"{count} {name}" for name, count in sorted(flips.codes.items()))
    figures(f"{cases} bits of {len(flips.sound)} files flipped: {told}")


@pytest.mark.ci_share
def test_a_rank_that_reads_a_flipped_bit_keeps_the_best_checkpoint(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], figures: Callable[[str], None]
) -> None:
    """The rank runs in this process: all that it reads, and a validation that chooses the best again."""
    tried = Counter[int]()
    for name in ("device.json", "skipped.jsonl", "metrics.jsonl", "best.json", "checkpoint.json"):
        for share in (0.1, 0.35, 0.6, 0.85):
            run_dir = tmp_path / f"{name}-{share}"
            shutil.copytree(whole, run_dir)
            flips = Flips(run_dir, capsys)
            path = max(path for path in flips.sound if path.name == name)
            flips.flip(path, int(8 * len(flips.sound[path]) * share))
            inline = ["launcher._target_=speechtrain.launchers.local.Local", "launcher.inline=true"]
            code = exit_code_of(lambda: train.run([f"run_dir={run_dir}", *inline, "trainer.max_steps=6"]))  # noqa: B023
            said = "".join(capsys.readouterr())
            assert code == 0, (name, share, said)
            assert flips.best is not None
            assert flips.best.is_dir() or flips.best.with_name(f"{flips.best.name}.damaged").is_dir()
            assert Checkpointer(run_dir).folders()[-1].name == "step-00000006"
            tried[code] += 1
            shutil.rmtree(run_dir)
    figures(f"{sum(tried.values())} runs continued from flipped files")
