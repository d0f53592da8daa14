"""SentencePiece models of a stranger: with changed bytes they load and work, or are one line."""

# ruff: noqa: E501 - tables of cases

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .data import Place
from .forks import MOST_BYTES, Forks, faults

CHILD = r"""
import resource, sys
from pathlib import Path
from speechtrain.errors import SpeechtrainError
from speechtrain.text.vocabulary import SentencePiece
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + MOST, size + MOST))
for path in sys.argv[1:]:
    print("BEGIN", path, flush=True)
    try:
        found = SentencePiece(path)
        for text in ("one two three four \ufb01 Ab\u00c5 \u3042", "", " ", "\0", "a" * 10000):
            try:
                found.encode(found.normalise(text))
            except ValueError:
                pass
        found.decode(list(range(min(found.blank, 50))))
        found.unknown("\u4e00 x"), found.state()
        print("END held", flush=True)
    except SpeechtrainError:
        print("END refused", flush=True)
    except BaseException as error:
        print("END", type(error).__name__, ascii(str(error))[:200], flush=True)
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "place")


@pytest.fixture
def model(forks: Forks, place: Place) -> bytes:
    texts = ["one two three", "four five six \u00c5", "seven eight nine zero"] * 5
    path = place.lines(*[place.nemo(text=text) for text in texts])
    out = place.folder / "base.model"
    ended = forks.run("prepare", "tokenizer", path, "--size", 20, "--out", out)
    assert faults(ended, refuses=False) == []
    return out.read_bytes()


def changed(model: bytes, count: int) -> list[bytes]:
    """Copies with bytes changed anywhere, and some torn."""
    draw, found = random.Random(0), []
    for number in range(count):
        content = bytearray(model)
        # odd ones: the pieces, before the table of the normaliser, which is nearly all of the file
        end = len(content) if number % 2 else min(len(content), 400)
        for _ in range(draw.choice([1, 2, 4, 16, 64, 500])):
            content[draw.randrange(end)] = draw.randrange(256)
        found.append(bytes(content[: draw.randrange(len(content))] if number % 10 == 0 else content))
    return found


def wire(field: int, content: bytes) -> bytes:
    """A field of a protocol buffer that holds bytes."""
    size, length = len(content), b""
    while size > 127:
        size, length = size >> 7, length + bytes([size & 127 | 128])
    return bytes([field << 3 | 2]) + length + bytes([size]) + content


def built(model: bytes) -> list[bytes]:
    """Models that are odd as a whole: nothing, no pieces, one piece, equal, empty and long pieces, depth."""
    piece = wire(1, wire(1, "▁a".encode()))
    deep = b""
    for _ in range(10_000):
        deep = wire(1, deep)[:65_536]
    return [b"", b"\0", b"\x0a", piece, piece * 2, wire(1, b""), wire(1, wire(1, b"")), deep,
            wire(1, wire(1, b"a" * 2**20)), piece * 100_000, model * 2, model + piece, model + b"\xff" * 100,
            model[::-1], b"\x0a\xff\xff\xff\xff\x07" + model, wire(3, wire(2, b"\xff" * 1_000)),
            model + wire(3, wire(2, b"\xff" * 1_000)), model + wire(3, wire(2, b"")), model + wire(5, wire(2, b"\xff" * 1_000)),
            model + wire(2, bytes([3 << 3, 9])), model + wire(2, bytes([3 << 3, 0]))]  # fmt: skip


def test_no_model_ends_the_process(place: Place, model: bytes) -> None:
    contents = [*changed(model, 800), *built(model)]
    paths = [
        str(place.file(f"models/{number:04d}.model", content)) for number, content in enumerate(contents)
    ]
    tally: Counter[str] = Counter()
    program = CHILD.replace("MOST", str(MOST_BYTES))
    done = subprocess.run(
        [sys.executable, "-c", program, *paths], capture_output=True, text=True, errors="replace", timeout=300
    )
    lines = done.stdout.splitlines()
    tally.update(line.split(maxsplit=1)[1] for line in lines if line.startswith("END"))
    last = next((line for line in reversed(lines) if line.startswith("BEGIN")), "")
    assert done.returncode == 0, f"ended with {done.returncode} in {last}: {done.stderr[-500:]}"
    assert tally.total() == len(paths)
    assert set(tally) == {"held", "refused"}, tally


def test_a_run_with_a_strange_tokenizer_is_one_line(forks: Forks, place: Place, model: bytes) -> None:
    """``train`` opens the model that the command line names, in this process."""
    source = place.lines(*[place.nemo(text="one two") for _ in range(4)])
    for number, content in enumerate([*changed(model, 20), *built(model)]):
        path = place.file(f"{number}.model", content)
        ended = forks.run(
            "train", "model=rnnt_small", "data=manifest", f"data.train={source}", f"data.valid.dev={source}",
            "tokenizer=sentencepiece", f"tokenizer.model={path}", "dry_run=true", "tracking=none",
            f"run_dir={place.folder / 'run'}", "device.threads=1",
        )  # fmt: skip
        assert faults(ended) == [], number


@pytest.mark.ci_share
@pytest.mark.parametrize(
    "kind", ["fifo", "/dev/zero", "folder", "/proc/self/environ", "none", "sparse", "json"]
)
def test_what_is_no_model_is_one_line(forks: Forks, place: Place, good: Path, kind: str) -> None:
    import os
    import shutil

    path = place.folder / "x.model"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 10 * 2**30)
    elif kind == "json":
        path.write_text(json.dumps({"a": 1}))
    elif kind.startswith("/"):
        path = Path(kind)
    line = ["tokenizer=sentencepiece", f"tokenizer.model={path}", f"run_dir={place.folder / 'run'}"]
    ended = forks.run("train", "recipe=demo", *line, "device.threads=1", "tracking=none")
    assert faults(ended, refuses=True) == []
    if kind != "none":  # in a stranger's run
        run_dir = place.folder / "run"
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(good, run_dir)
        config = (run_dir / "config.yaml").read_text()
        start = config.index("tokenizer:")
        kept = config[config.index("\n", start) :].splitlines()
        rest = next(i for i, text in enumerate(kept) if text and not text.startswith(" "))
        own = f"tokenizer:\n  _target_: speechtrain.text.vocabulary.SentencePiece\n  model: {path}\n"
        (run_dir / "config.yaml").write_text(config[:start] + own + "\n".join(kept[rest:]) + "\n")
        assert faults(forks.run("transcribe", run_dir, place.ok), refuses=True) == []
