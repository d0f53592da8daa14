"""Reports of runs of strangers: the page is inert, private and where it should be, and it ends."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from .forks import Ended, Forks, faults

TAGS = "<img src=x onerror=alert(1)></script><script>alert(2)</script>\"'>&`${7*7}`\x1b[31m\u202e<!--]]>"
MOST_PAGE = 50 * 2**20


@pytest.fixture
def run_dir(good: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(good / "config.yaml", folder)
    rows = [{"event": "train", "step": step, "loss": 2.0 / step, "lr": 1e-3} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text(lines(*rows, {"event": "valid", "step": 2, "set": "a", "wer": 0.5}))
    (folder / "result.json").write_text(
        json.dumps({"status": "finished", "steps": 2, "metrics": {"wer": 0.5}})
    )
    (folder / "run.json").write_text(json.dumps({"argv": ["a"], "overrides": [], "written": {}}))
    return folder


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def report(forks: Forks, run_dir: Path, *more: object) -> tuple[Ended, str]:
    """The command, and the page where there is one."""
    page = run_dir.parent / "out.html"
    ended = forks.run("report", run_dir, "--out", page, *more)
    return ended, page.read_text() if page.exists() else ""


class Handlers(HTMLParser):
    """The attributes of a page's tags that run code."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}" for name, _ in attrs if name.startswith("on")]

    @classmethod
    def of(cls, page: str) -> list[str]:
        parser = cls()
        parser.feed(page)
        return parser.found


def active(page: str) -> list[str]:
    """What is not inert in a page, apart from its own script and styles."""
    own = re.sub(r"<script>.*?</script>", "", page, count=1, flags=re.S)
    found = re.findall(
        r"<script(?! type=\"application/json\")|<img|<iframe|<object|<embed|<base|javascript:", own
    )
    found += Handlers.of(own)
    found += ["an open comment"] if "<!--" in own else []
    return found + (["a long page"] if len(page) > MOST_PAGE else [])


EVENTS = ("device", "start", "train", "valid", "examples", "warning", "checkpoint", "resume", "end", "x")
FIELDS = [
    *("step", "loss", "lr", "steps", "eta_s", "time", "parameters", "wer", "cer", "set", "rows", "seconds"),
    *("message", "grad_norm", "path", "epoch", "error", "metrics", "checkpoint", "status"),
]
VALUES: dict[str, Any] = {
    "null": None,
    "list": [1],
    "text": "x",
    "number": 5,
    "true": True,
    "nan": float("nan"),
    "tags": TAGS,
    "inf": float("inf"),
    "1e308": 1e308,
    "tiny": 5e-324,
    "long": 10**4000,
    "400 digits": 10**400,
    "-1": -1,
    "mapping": {"a": 1},
    "empty": "",
    "nested": [[[[{}]]]],
    "surrogate": "\ud800",
}


@pytest.mark.parametrize("name", VALUES)
def test_every_field_of_a_run_is_anything(name: str, run_dir: Path, forks: Forks) -> None:
    value = VALUES[name]
    row = dict.fromkeys(FIELDS, value)
    (run_dir / "metrics.jsonl").write_text(lines(*({**row, "event": event} for event in EVENTS)))
    keys = ("status", "error", "metrics", "metric", "steps", "wall_s", "limits", "checkpoint", "last_metrics")
    (run_dir / "result.json").write_text(json.dumps(dict.fromkeys(keys, value)))
    keys = ("argv", "overrides", "git", "versions", "platform", "host", "device", "seed", "latest", "written")
    (run_dir / "run.json").write_text(json.dumps(dict.fromkeys(keys, value)))
    (run_dir / "skipped.jsonl").write_text(lines({"id": value, "reason": value, "detail": value}))
    if not isinstance(value, int) or abs(value) < 10**300:
        (run_dir / "config.yaml").write_text(
            json.dumps({"seed": value, "world_size": value, "device": value})
        )
    ended, page = report(forks, run_dir)
    assert faults(ended, refuses=False) == []
    assert active(page) == []


def examples(reference: Any, hypothesis: Any) -> str:
    row = {"id": "a", "reference": reference, "hypothesis": hypothesis}
    return lines({"event": "examples", "step": 1, "set": "a", "rows": [row]})


def train(*steps: Any) -> str:
    return lines(*({"event": "train", "step": step, "loss": 1.0} for step in steps))


DEEP = "[" * 100_000
LOGS: dict[str, str] = {
    "tags everywhere": lines(
        {
            "event": "examples",
            "step": 1,
            "set": TAGS,
            "rows": [{"id": TAGS, "reference": TAGS, "hypothesis": "a"}],
        },
        {"event": "valid", "step": 1, "set": TAGS, TAGS: 1.0, "wer": 0.5},
        {"event": "valid", "step": 2, "set": TAGS, TAGS: 2.0},
        {"event": "train", "step": 1, TAGS: 3.0},
        {"event": "train", "step": 2, TAGS: 3.0},
        {"event": "warning", "message": TAGS},
    ),
    "nested": '{"event":"train","x":' + DEEP + "}\n" + DEEP + "\n" + '{"a":' * 10**5 + "\n",
    "long numbers": '{"event":"train","step":' + "9" * 5_000 + "}\n",
    "large steps": train(1e308, -1e308, 5, 10**200),
    "steps that are one": train(10**16, 10**16 + 1),
    "tiny losses": lines(*({"event": "train", "step": s, "loss": v} for s, v in ((1, 5e-324), (2, 1e308)))),
    "backwards": train(*range(20_000, 0, -1)),
    "to and fro": train(*(i if i % 2 else i - 1 for i in range(40_000))),
    "10^4 metrics": lines({"event": "valid", "step": 1, "set": "a", **{f"m{i}": 1.0 for i in range(10_000)}}),
    "3,000 sets": lines(
        *({"event": "valid", "step": s, "set": f"s{i}", "wer": 0.1} for i in range(3_000) for s in (1, 2))
    ),
    "3,000 sets of examples": lines(
        *(
            {"event": "examples", "step": 1, "set": f"s{i}", "rows": [{"reference": "a"}]}
            for i in range(3_000)
        )
    ),
    "words of 1 MB": examples("x" * 10**6, "y" * 10**6),
    "10^5 words": examples("x y " * 10**5, "y z " * 10**5),
    "10^5 different words": examples(
        " ".join(map(str, range(10**5))), " ".join(map(str, range(10**5, 0, -1)))
    ),
    "10^5 rows": lines(
        {"event": "examples", "step": 1, "set": "a", "rows": [{"id": "a", "reference": "x y"}] * 10**5}
    ),
    "rows of anything": lines(
        {
            "event": "examples",
            "step": 1,
            "set": "a",
            "rows": [1, None, "x", {"reference": 5, "hypothesis": None}],
        }
    ),
    "10^5 resumes": train(1) + lines(*({"event": "resume", "step": i} for i in range(10**5))),
    "10^5 warnings": lines(*({"event": "warning", "message": f"w{i}"} for i in range(10**5))),
    "a warning of 10^7 letters": lines({"event": "warning", "message": "x" * 10**7}),
    "a line of 20 MB": '{"event":"train","x":"' + "a" * (20 * 2**20) + '"}\n',
    "10^6 empty lines": "\n" * 10**6,
    "NULs": "\0" * 10**6,
    "surrogates": '{"event":"warning","message":"\\ud800 x"}\n',
    "a key of 10^6 letters": lines({"event": "valid", "step": 1, "set": "a", "x" * 10**6: 1.0}),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LOGS)
def test_a_log_of_anything(name: str, run_dir: Path, forks: Forks) -> None:
    (run_dir / "metrics.jsonl").write_text(LOGS[name])
    ended, page = report(forks, run_dir)
    assert faults(ended, refuses=False) == []
    assert active(page) == []


HOST = platform.node()
LOCKS = [f"pid {n} on {HOST}" for n in ("9" * 400, "9" * 5_000, "0", "-1", "4194305", "1e9", "²", "1\x1b[2J")]
OTHERS: dict[str, list[str]] = {
    "lock": [*LOCKS, "pid 1 on " + TAGS, "\0" * 100, "x" * 10**6, "\ud800"],
    "result.json": [
        "{}",
        DEEP,
        '{"steps":' + "9" * 5_000 + "}",
        "",
        '{"status":"\\udfff"}',
        json.dumps({"status": TAGS}),
    ],
    "run.json": [
        "{}",
        DEEP,
        "[]",
        json.dumps({"argv": [TAGS] * 10**5}),
        json.dumps({"git": {"commit": TAGS, TAGS: 1}}),
    ],
    "skipped.jsonl": [
        DEEP,
        lines(*({"id": i, "reason": f"r{i}", "detail": TAGS} for i in range(20_000))),
        "\0\n" * 10**5,
    ],
    "config.yaml": [
        "a: " + "b" * 10**7,
        "seed: |\n\n  " + TAGS.replace("\x1b", "") + "\n",
        "\udcff\n",
        "a: *b\n",
    ],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", OTHERS)
def test_another_file_of_anything(name: str, run_dir: Path, forks: Forks) -> None:
    if name == "lock":
        (run_dir / "result.json").unlink()
    for text in OTHERS[name]:
        (run_dir / name).write_bytes(text.encode("utf-8", "surrogatepass"))
        ended, page = report(forks, run_dir)
        assert faults(ended, refuses=False) == [], text[:40]
        assert active(page) == [], text[:40]


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 * 2**30)


KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "10 GB": sparse,
    "a folder": lambda path: path.mkdir(),
    "a private file": lambda path: path.symlink_to("../id_rsa"),
    "a private file by a folder": lambda path: path.symlink_to("../home/../id_rsa"),
    "the environment": lambda path: path.symlink_to("/proc/self/environ"),
    "a circle": lambda path: path.symlink_to(path.name),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_none(kind: str, run_dir: Path, forks: Forks) -> None:
    told = {}
    private = {
        "status": "PRIVATE",
        "event": "warning",
        "message": "PRIVATE",
        "argv": ["PRIVATE"],
        "id": "PRIVATE",
    }
    (run_dir.parent / "id_rsa").write_text(json.dumps(private) + "\n")
    (run_dir.parent / "home").mkdir()
    for name in (
        "metrics.jsonl",
        "result.json",
        "run.json",
        "skipped.jsonl",
        "config.yaml",
        "lock",
        "device.json",
    ):
        kept = run_dir.parent / "kept"
        shutil.copytree(run_dir, kept)
        (run_dir / name).unlink(missing_ok=True)
        KINDS[kind](run_dir / name)
        ended, page = report(forks, run_dir)
        found = faults(ended, private=["PRIVATE", "MARKED"])
        found += [text for text in ("PRIVATE", "MARKED") if text in page]
        if found or active(page):
            told[name] = found
        shutil.rmtree(run_dir)
        kept.rename(run_dir)
    assert not told, "\n".join(f"{name}: {found}" for name, found in told.items())


@pytest.mark.ci_share
def test_a_page_that_is_a_link_gives_no_stranger_a_login(run_dir: Path, forks: Forks) -> None:
    """His key is a line of the config, which the page shows."""
    own, key = run_dir.parent / "authorized_keys", run_dir.parent / "stranger"
    own.write_text("# the user's own keys\n")
    if shutil.which("ssh-keygen"):
        line = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "stranger", "-f", str(key)]
        subprocess.run(line, check=True)
        public = key.with_suffix(".pub").read_text()
    else:
        public = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA stranger\n"
    (run_dir / "config.yaml").write_text(f"seed: |\n\n  x\n{public}")
    for name in ("report.html", "comparison.html"):
        (run_dir / name).symlink_to(own)
        ended = forks.run("report", *[run_dir] * (2 if name == "comparison.html" else 1))
        assert faults(ended, refuses=False) == []
        assert own.read_text() == "# the user's own keys\n"
        assert not (run_dir / name).is_symlink()


def test_names_with_escapes(run_dir: Path, forks: Forks) -> None:
    for name in ("esc\x1b]0;t\x07\x1b[31m", "turned\u202eround", "line\nbreak", "<b>&'\"", "\udcff"):
        other = run_dir.parent / name
        shutil.copytree(run_dir, other)
        for given in ([other], [other, run_dir], [run_dir.parent]):
            ended = forks.run("report", *given)
            assert faults(ended, refuses=False) == [], given
        assert active((other / "report.html").read_text()) == []
        (other / "empty").mkdir()
        assert faults(forks.run("report", other / "empty"), refuses=True) == []
        assert faults(forks.run("report", other / "none"), refuses=True) == []
        shutil.rmtree(other)
        (run_dir.parent / "comparison.html").unlink(missing_ok=True)


def test_many_runs(run_dir: Path, forks: Forks) -> None:
    others = []
    for number in range(60):
        others.append(run_dir.parent / f"r{number}")
        shutil.copytree(run_dir, others[-1])
        (others[-1] / "config.yaml").write_text(
            f"seed: {number}\n" + "".join(f"k{i}: {number}\n" for i in range(2000))
        )
    assert faults(forks.run("report", *others), refuses=False) == []
