"""Training on in a run whose checkpoint and results a stranger has made: one line, or it goes on."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hostile_pickles import Calls, doubled, saved, tenfold

from .forks import Ended, Forks, faults

ARGUMENTS = [
    *("model=rnnt_small", "device.threads=1", "device.autotune=false", "tracking=jsonl", "data.workers=0"),
    *("data.train.utterances=40", "data.valid.unheard.utterances=3", "encoder.hidden=16"),
    *("model.prediction.hidden=16", "model.prediction.embedding=8", "model.joint.hidden=16"),
    *("launcher=local", "launcher.inline=true", "decoder.max_symbols=20"),
]
STEP = "checkpoints/step-00000002"


def train(forks: Forks, run_dir: Path, steps: int = 4, **more: float) -> Ended:
    line = [*ARGUMENTS, f"trainer.max_steps={steps}", f"run_dir={run_dir}"]
    return forks.run("train", *line, **{"seconds": 180.0, **more})  # on a busy machine


@pytest.fixture(scope="module")
def trained(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    assert faults(train(forks, run_dir, 2), refuses=False) == []
    return run_dir


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A copy that names itself."""
    return copied(trained, tmp_path / "run")


def copied(trained: Path, run_dir: Path) -> Path:
    shutil.copytree(trained, run_dir)
    text = (run_dir / "config.yaml").read_text().partition("\n")[2]
    (run_dir / "config.yaml").write_text(text.replace(str(trained), str(run_dir)))
    return run_dir


def sign(folder: Path, **more: Any) -> None:
    """Give a checkpoint's manifest the digests of its files and its own, as a stranger can."""
    held = {**json.loads((folder / "checkpoint.json").read_text()), **more}
    held.pop("sha256", None)
    if isinstance(held["files"], dict):
        held["files"] = {n: digest_of(folder / n) or d for n, d in held["files"].items()}
    own = hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()
    (folder / "checkpoint.json").write_text(json.dumps({**held, "sha256": own}))


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


# --- state.pt -----------------------------------------------------------------------------------


def zipped(content: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", b"\0" * 64)
    return buffer.getvalue()


def nested() -> list[Any]:
    inner: list[Any] = []
    for _ in range(100_000):
        inner = [inner]
    return inner


FILES: dict[str, Callable[[Path], bytes]] = {
    "a call": lambda canary: zipped(pickle.dumps({"task": Calls(os.system, f"touch {canary}")}, 2)),
    "a call of a key": lambda canary: zipped(pickle.dumps({Calls(os.system, f"touch {canary}"): 1}, 2)),
    "a call, legacy": lambda canary: pickle.dumps(Calls(os.system, f"touch {canary}"), 2),
    "a program": lambda canary: zipped(b"\x80\x02csubprocess\nPopen\n(X\x05\x00\x00\x00touchtR."),
    "a tuple doubled": lambda canary: zipped(doubled(40)),
    "lists of lists": lambda canary: saved({"task": tenfold(9)}),
    "lists of lists as metrics": lambda canary: saved({"progress": {"metrics": tenfold(12)}}),
    "a list": lambda canary: saved([1]),
    "a number": lambda canary: saved(7),
    "a text": lambda canary: saved("task"),
    "pairs": lambda canary: saved([("task", 1)]),
    "keys that are none": lambda canary: saved({1: 2, None: 3}),
    "no parts": lambda canary: saved({}),
    "a compressed bomb": lambda canary: zipped(
        b"\x80\x02X" + struct.pack("<I", 2**30) + b"a" * 2**30 + b".", zipfile.ZIP_DEFLATED
    ),
    "an object with the number 2^31": lambda canary: zipped(
        b"\x80\x02Nr" + struct.pack("<I", 2**31 - 1) + b"."
    ),
    "a text longer than the file": lambda canary: zipped(b"\x80\x02X" + struct.pack("<I", 2**31 - 1) + b"."),
    "marks": lambda canary: zipped(b"\x80\x02" + b"(" * 10**6 + b"."),
    "tuples in tuples": lambda canary: zipped(b"\x80\x02" + b"(" * 10**5 + b"t" * 10**5 + b"."),
    "lists in lists": lambda canary: zipped(b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"."),
    "nothing": lambda canary: b"",
    "rubbish": lambda canary: os.urandom(1000),
    "half an archive": lambda canary: saved({"task": 1})[:100],
}


@pytest.mark.ci_share
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", FILES)
def test_a_signed_state_of_anything(name: str, run_dir: Path, forks: Forks, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (run_dir / STEP / "state.pt").write_bytes(FILES[name](canary))
    sign(run_dir / STEP)
    assert faults(train(forks, run_dir), refuses=True, canaries=[canary]) == []


STRANGE: list[Any] = [
    None,
    "x",
    -1,
    10**400,
    float("nan"),
    [1],
    {"a": 1},
    True,
    torch.zeros(3),
    torch.zeros(()),
]


def leaves(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The addresses of everything in a state, of tensors of one part only the first few."""
    found = [path] if path else []
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        inner = leaves(value, (*path, key))
        found += inner if len(found) < 40 else []
    return found


def at(state: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        state = state[key]
    state[path[-1]] = value


@pytest.mark.timeout(3600)
def test_a_state_with_a_value_of_another_type(trained: Path, forks: Forks, tmp_path: Path) -> None:
    """Every value of every part in turn, each with one of the strange ones."""
    read = lambda: torch.load(trained / STEP / "state.pt", weights_only=True)  # noqa: E731
    told = {}
    for number, path in enumerate(leaves(read())):
        value = STRANGE[(3 * number + number // 10) % len(STRANGE)]
        state, run_dir = read(), copied(trained, tmp_path / "run")
        at(state, path, value)
        torch.save(state, run_dir / STEP / "state.pt")
        sign(run_dir / STEP)
        if found := faults(train(forks, run_dir)):
            told[f"{path} = {ascii(value)[:30]}"] = found
        shutil.rmtree(run_dir)
    assert not told, "\n".join(f"{name}: {found}" for name, found in told.items())


def without(*path: Any) -> Callable[[Any], object]:
    def change(state: Any) -> None:
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return change


def put(*path: Any, value: Any) -> Callable[[Any], object]:
    return lambda state: at(state, path, value)


def first(state: Any) -> dict[str, Any]:
    return state["optimizer"]["state"][0]  # type: ignore[no-any-return]


def spread(*shape: int) -> torch.Tensor:
    """A tensor that is large, of one value in its file."""
    return torch.zeros(1).expand(shape)


CHANGES: dict[str, Callable[[Any], object]] = {
    "no progress": without("progress"),
    "no step": without("progress", "step"),
    "no average": without("average", "average"),
    "no groups": put("optimizer", "param_groups", value=[]),
    "a group more": lambda s: s["optimizer"]["param_groups"].append(s["optimizer"]["param_groups"][0]),
    "no parameters": put("optimizer", "param_groups", 0, "params", value=[]),
    "betas in words": put("optimizer", "param_groups", 0, "betas", value="ab"),
    "one beta": put("optimizer", "param_groups", 0, "betas", value=(0.9,)),
    "another kind of AdamW": put("optimizer", "param_groups", 0, "amsgrad", value=True),
    "capturable": put("optimizer", "param_groups", 0, "capturable", value=True),
    "differentiable": put("optimizer", "param_groups", 0, "differentiable", value=True),
    "a scale of rates in words": put("optimizer", "param_groups", 0, "lr_scale", value="x"),
    "no state of a parameter": without("optimizer", "state", 0),
    "states of none": put("optimizer", "state", 10**6, value={"step": torch.zeros(())}),
    "half a state": lambda s: first(s).pop("exp_avg"),
    "a state of another shape": lambda s: first(s).update(exp_avg=torch.zeros(3)),
    "a state of one number": lambda s: first(s).update(exp_avg=torch.zeros(())),
    "a state that is large": lambda s: first(s).update(exp_avg=spread(2**40)),
    "a state of 3 GB": lambda s: first(s).update(exp_avg=spread(800_000_000)),
    "a state of other numbers": lambda s: first(s).update(exp_avg=torch.zeros(3, dtype=torch.complex64)),
    "a step that is large": lambda s: first(s).update(step=spread(2**40)),
    "a step below none": lambda s: first(s).update(step=torch.tensor(-5.0)),
    "a step that is none": lambda s: first(s).update(step=torch.tensor(float("nan"))),
    "a tensor that is nowhere": lambda s: first(s).update(exp_avg=torch.empty(2**40, device="meta")),
    "a weight that is nowhere": lambda s: s["task"].update(
        dict.fromkeys(s["task"], torch.empty(2**33, device="meta"))
    ),
    "a weight that is large": lambda s: s["task"].update(dict.fromkeys(s["task"], spread(2**40))),
    "an average that is large": lambda s: s["average"]["average"].update(
        dict.fromkeys(s["task"], spread(2**40))
    ),
    "a step of the far future": put("progress", "step", value=10**30),
    "a step before the first": put("progress", "step", value=-5),
    "a schedule without a position": without("schedule", "position"),
    "nothing on what was held out": without("data", "held_out"),
    "a schedule of no steps": put("schedule", "steps", value=0),
    "a schedule of fewer than none": put("schedule", "steps", value=-1),
    "a schedule for ever": put("schedule", "steps", value=10**300),
    "an epoch of the far future": put("data", "epoch", value=2**62),
    "an epoch beyond": put("data", "epoch", value=2**70),
    "an epoch before": put("data", "epoch", value=-1),
    "a position beyond": put("data", "position", value=2**62),
    "a position before": put("data", "position", value=-1),
    "skipped by no name": put("data", "skipped", value={1: 2}),
    "skipped in a list": put("data", "skipped", value=["a"]),
    "escapes in the skipped": put("data", "skipped", value={"\x1b[2J": "\x1b]0;x\x07"}),
    "escapes in metrics": put("progress", "metrics", value={"\x1b[2J\u202e": 1.0, "wer": "\x1b[31m"}),
    "metrics of words": put("progress", "metrics", value={"wer": "x", "loss": [1]}),
    "a long time": put("progress", "wall_s", value=1e308),
    "no time": put("progress", "wall_s", value=float("nan")),
    "time before": put("progress", "wall_s", value=-1e300),
    "a divisor of nothing": put("progress", "backward_divisor", value=5e-324),
    "a divisor below nothing": put("progress", "backward_divisor", value=-1.0),
    "methods": put("progress", "state_dict", value=1),
    "the average's count": put("average", "updates", value=-10),
    "the average's long count": put("average", "updates", value=10**400),
    "a key of the task": lambda s: s["task"].update({"\x1b[2J": torch.zeros(1)}),
    "a task of texts": lambda s: s["task"].update(dict.fromkeys(s["task"], "x")),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", CHANGES)
def test_a_state_with_strange_content(name: str, run_dir: Path, forks: Forks) -> None:
    state = torch.load(run_dir / STEP / "state.pt", weights_only=True)
    CHANGES[name](state)
    torch.save(state, run_dir / STEP / "state.pt")
    sign(run_dir / STEP)
    assert faults(train(forks, run_dir)) == []


# --- its manifest, and the results --------------------------------------------------------------

DEEP = "[" * 100_000
LONG = "9" * 5_000
MANIFESTS: dict[str, dict[str, Any]] = {
    "a metric of 400 digits": {"metric": 10**400},
    "a metric in words": {"metric": "x"},
    "a metric that is a list": {"metric": [1]},
    "metrics of 400 digits": {"metrics": {"wer": 10**400, "loss": 10**400}},
    "metrics in words": {"metrics": {"wer": "\x1b[31m", "loss": "x"}},
    "metrics that are a list": {"metrics": [1]},
    "metrics of lists": {"metrics": {"wer": [1], "loss": {"a": 1}}},
    "metrics of nothing": {"metrics": None},
    "names with escapes": {"metrics": {"\x1b]0;x\x07": 1.0, "unheard/\u202ewer": 0.5}},
    "a time in words": {"wall_s": "x"},
    "a time of 400 digits": {"wall_s": 10**400},
    "no time": {"wall_s": None},
    "a step in words": {"step": "2"},
    "a step of 400 digits": {"step": 10**400},
    "a step that is a fraction": {"step": 2.5},
    "a step that is true": {"step": True},
    "another step": {"step": 3},
    "no files": {"files": {}},
    "files in a list": {"files": ["state.pt"]},
    "files elsewhere": {"files": {"state.pt": "x", "model.safetensors": "y", "../../../home": "z"}},
    "shards elsewhere": {
        "format": 2,
        "files": {"state.pt": "x", "model.safetensors": "y", "shards/../../a": "z"},
    },
    "digests of numbers": {"files": {"state.pt": 5, "model.safetensors": None}},
    "a format of the future": {"format": 10**400},
    "a format in a list": {"format": [2]},
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_of_anything(name: str, run_dir: Path, forks: Forks) -> None:
    sign(run_dir / STEP, **MANIFESTS[name])
    (run_dir / "result.json").unlink()
    for command in ("evaluate", "report"):
        assert faults(forks.run(command, run_dir, *["device.threads=1"][: command == "evaluate"])) == [], (
            command
        )
    assert faults(train(forks, run_dir)) == []


RESULTS: dict[str, Any] = {
    "metrics of 400 digits": {"metrics": {"wer": 10**400, "loss": -(10**400)}},
    "metrics in a list": {"metrics": [1]},
    "metrics of nothing": {"metrics": None},
    "metrics of escapes": {"metrics": {"wer\x1b]0;x\x07": 1.0, "b": "\x1b[31m\u202e"}},
    "metrics of lists": {"metrics": {"wer": [1], "a/wer": {"b": 1}}},
    "metrics of metrics": {"metrics": {"a/b/c/wer": 1, "/": 2, "": 3}},
    "last metrics in a list": {"last_metrics": [1]},
    "other last metrics": {"last_metrics": {"wer": 0.5}},
    "a step in a list": {"steps": [2]},
    "a step of 400 digits": {"steps": 10**400},
    "a step in words": {"steps": "00000002"},
    "a step with an escape": {"steps": "2\x1b[2J"},
    "no limits": {"limits": None},
    "limits in a list": {"limits": [1]},
    "limits of nothing": {"limits": {}},
    "a status in a list": {"status": ["finished"]},
    "a status with an escape": {"status": "finished\x1b[2J"},
    "failed": {"status": "failed", "error": "\x1b[2J", "exit_code": 3},
    "failed with a long code": {"status": "failed", "error": ["x"], "exit_code": 10**400, "rank": "x"},
    "failed with no code": {"status": "failed", "error": None, "exit_code": [1], "failed_at": "x"},
    "preempted": {"status": "preempted"},
    "a metric in a list": {"metric": [1]},
    "a checkpoint of numbers": {"checkpoint": 5},
    "a time in words": {"wall_s": "x"},
}
TEXTS = [
    "",
    "[]",
    "5",
    "null",
    '"x"',
    DEEP,
    '{"a":' * 50_000,
    '{"steps":' + LONG + "}",
    "\ud800",
    "{" * 10**6,
    "\0" * 1000,
]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", RESULTS)
def test_a_result_of_anything(name: str, run_dir: Path, forks: Forks) -> None:
    content = {**json.loads((run_dir / "result.json").read_text()), **RESULTS[name]}
    (run_dir / "result.json").write_text(json.dumps(content))
    (run_dir / "ranks" / "1").mkdir(parents=True)
    (run_dir / "ranks" / "1" / "result.json").write_text(json.dumps(content))
    for steps in (2, 3):
        assert faults(train(forks, run_dir, steps)) == [], steps


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", ["result.json", "run.json", "device.json", "checkpoints/best.json", f"{STEP}/checkpoint.json"]
)
def test_a_file_of_json_of_anything(name: str, trained: Path, forks: Forks, tmp_path: Path) -> None:
    told = {}
    for text in TEXTS:
        run_dir = copied(trained, tmp_path / "run")
        (run_dir / name).write_text(text, errors="surrogatepass")
        if found := faults(train(forks, run_dir, 3)):
            told[text[:20]] = found
        shutil.rmtree(run_dir)
    assert not told, "\n".join(f"{text}: {found}" for text, found in told.items())


CHOICES: dict[str, Any] = {
    "matmul in a list": {"matmul": ["x"]},
    "a chip of numbers": {"chip": 5},
    "every kind": {"lstm": 10**400, "dtype": "x", "autocast": {"a": 1}, "threads": -1},
    "policies": {"policy": {"_target_": "os.system"}, "policies": [1]},
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_of_a_device_of_anything(name: str, run_dir: Path, forks: Forks) -> None:
    content = {**json.loads((run_dir / "device.json").read_text()), **CHOICES[name]}
    (run_dir / "device.json").write_text(json.dumps(content))
    assert faults(train(forks, run_dir, 3)) == []
    for key in content:
        for value in (None, [1], {"a": 1}, "\x1b[2J", 10**400):
            (run_dir / "device.json").write_text(json.dumps({**content, key: value}))
            assert faults(forks.run("evaluate", run_dir, "device.threads=1")) == [], (key, value)


@pytest.mark.timeout(3600)
def test_each_bit_of_a_result(run_dir: Path, forks: Forks) -> None:
    """By the functions that read it: a command for each bit would take an hour."""
    from speechtrain.run_directory import outcome_text, read_failure, read_result
    from speechtrain.runs.start import _describe, _is_complete

    path = run_dir / "result.json"
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        read_failure(run_dir)
        if (found := read_result(run_dir)) is not None and _is_complete(found, run_dir):
            assert isinstance(outcome_text(found.metrics, found.last_metrics, found.checkpoint), str)
            assert isinstance(_describe(found), str)


# --- places -------------------------------------------------------------------------------------

NAMES = [
    *("config.yaml", "run.json", "result.json", "metrics.jsonl", "output.log", "device.json", "error.log"),
    *("report.html", "skipped.jsonl", "filtered.jsonl", "lock", "agent.log", "checkpoints", "ranks", "stuck"),
    *("ranks/0", "ranks/1/result.json", "checkpoints/best.json", STEP, f"{STEP}/state.pt", "tokenizer.model"),
    *(
        f"{STEP}/model.safetensors",
        f"{STEP}/checkpoint.json",
        f"{STEP}/shards",
        "checkpoints/.writing-step-00000004",
    ),
    *(
        "checkpoints/step-00000004",
        "checkpoints/step-x",
        "checkpoints/step-99999999",
        "tensorboard",
        "profile-4-4.json",
    ),
    *("checkpoints/.replaced-step-00000009", "checkpoints/step-00000002.damaged"),
]


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def full(path: Path) -> None:
    path.mkdir()
    (path / "own").write_text("x")


KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": full,
    "an empty folder": lambda path: path.mkdir(),
    "a file": lambda path: path.write_text("x"),
    "an empty file": lambda path: path.write_text(""),
    "a TB": sparse,
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "a circle": lambda path: path.symlink_to(path.name),
    "no rights": lambda path: path.write_text("x") and path.chmod(0),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(3))
def test_a_name_of_a_run_is_of_another_kind(first: int, trained: Path, forks: Forks, tmp_path: Path) -> None:
    """Each name in three of the nine kinds."""
    told = {}
    for number, name in enumerate(NAMES):
        kind = [*KINDS][(number + 3 * first + number // 9) % len(KINDS)]
        run_dir = copied(trained, tmp_path / "run")
        path = run_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        KINDS[kind](path)
        if found := faults(train(forks, run_dir)):
            told[f"{name}: {kind}"] = found
        shutil.rmtree(run_dir)
    assert not told, "\n".join(f"{name}: {found}" for name, found in told.items())
