"""A run whose config.yaml somebody else wrote: evaluating it, and a report of it, run none of his code."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from .forks import Ended, Forks, faults

Change = Callable[[dict[str, Any]], object]


def edited(good: Path, folder: Path, change: Change) -> Path:
    """A copy of a run with another config."""
    content = copy.deepcopy(yaml.safe_load((good / "config.yaml").read_text()))
    change(content)
    return written(good, folder, yaml.safe_dump(content, sort_keys=False, width=10**9))


def written(good: Path, folder: Path, text: str | bytes) -> Path:
    run_dir = folder / "run"
    shutil.copytree(good, run_dir)
    content = text if isinstance(text, bytes) else text.encode()
    (run_dir / "config.yaml").write_bytes(content.replace(str(good).encode(), str(run_dir).encode()))
    return run_dir


def evaluate(forks: Forks, run_dir: Path, *more: str) -> Ended:
    return forks.run("evaluate", run_dir, "device.threads=1", *more)


def put(key: str, value: Any) -> Change:
    def change(config: dict[str, Any]) -> None:
        *path, leaf = key.split(".")
        node = config
        for name in path:
            node = node[name]
        node[leaf] = value

    return change


def without(key: str) -> Change:
    def change(config: dict[str, Any]) -> None:
        *path, leaf = key.split(".")
        node = config
        for name in path:
            node = node[name]
        del node[leaf]

    return change


def several(*changes: Change) -> Change:
    return lambda config: [change(config) for change in changes]


# --- classes ------------------------------------------------------------------------------------

TARGETS: list[Any] = [
    *("os.system", "posix.system", "subprocess.Popen", "builtins.eval", "builtins.exec", "runpy.run_path"),
    *("speechtrain.run_directory.subprocess.Popen", "speechtrain.launcher.os.system", "torch.os.system"),
    *("speechtrain.commands.doctor.subprocess.run", "speechtrain.data.workers.multiprocessing.Process"),
    *("torch.hub.load", "torch.load", "torch.utils.cpp_extension.load", "torch.package.PackageImporter"),
    *("torch.optim.Optimizer.__init__", "torch.optim.SGD", "torch.optim.lbfgs.LBFGS", "torch.nn.Linear"),
    *("functools.partial", "hydra.utils.get_method", "hydra.utils.instantiate", "speechtrain.config.build"),
    *("speechtrain", "speechtrain.", "speechtrain..x", ".speechtrain.x", "speechtrain.text", "", " ", "."),
    *("speechtrain.__import__('os').system", "speechtrain.text.vocabulary.Tokenizer"),
    *(
        "speechtrain.text.vocabulary.Characters.__class__",
        "speechtrain.text.vocabulary.Characters.__init_subclass__",
    ),
    *("speechtrain.train_rank.StopRequest", "speechtrain.launcher.Job", "speechtrain.files.atomic"),
    *("speechtrain.commands._cli.Parser", "speechtrain.train_rank", "speechtrain.commands.train.main"),
    *("launchers.ssh.Ssh", "speechtrain.launchers.ssh.Ssh", "lhotse.audio.source.AudioSource", "numpy.load"),
    *("antigravity.x", "conftest.X", "this.x", "speechtrain.text.vocabulary.Path", "torch.classes.x.y"),
    *("speechtrain.files.MOST_BYTES.x", "speechtrain.files.MOST_BYTES.real", "torch.optim.SGD.step.x.y"),
    *("torch.optim.optimizer.torch.classes.x.y", "torch.optim.optimizer.torch.ops.aten.add"),
    "speechtrain.config.schema.INJECTED.keys",
    *("torch.serialization.pickle.Unpickler", "speechtrain.interop.pickles.Inert", "torch.ops.aten.add"),
    *("ｓｐｅｅｃｈｔｒａｉｎ.x", "speechtrain.\x1b[31mX", "speechtrain.x\u202e", "speechtrain.\nX"),
    *(5, None, ["x"], {"a": 1}, True, 1.5, "x.y" * 10**4, "${oc.env:HOME}", "${tokenizer}", "a" * 10**5),
]


@pytest.mark.parametrize("part", ["tokenizer", "data.valid.x", "encoder.features", "device", "launcher"])
def test_a_class_of_a_config_is_a_part(part: str, forks: Forks, good: Path, tmp_path: Path) -> None:
    told = {}
    for number, target in enumerate(TARGETS):
        if part != "tokenizer" and number % 5:
            continue
        canary, own = tmp_path / "canary", tmp_path / str(number)
        own.mkdir()
        command = f"touch {canary}"
        node = {"_target_": target, "command": command, "args": ["sh", "-c", command]}
        run_dir = edited(good, own, put(part, node))
        refuses = None if part == "launcher" else True  # which an evaluation does not build
        if found := faults(evaluate(forks, run_dir), refuses=refuses, canaries=[canary]):
            told[str(target)[:60]] = found
        shutil.rmtree(own)
    assert not told, "\n".join(f"{name}: {found}" for name, found in told.items())


SPECIAL = ["_partial_", "_args_", "_convert_", "_recursive_", "self", "tokenizer", "__class__", "0", ""]


def test_no_key_changes_how_a_class_is_called(forks: Forks, good: Path, tmp_path: Path) -> None:
    told = {}
    for part in ("tokenizer", "model.joint", "encoder"):
        for key in SPECIAL:
            own = tmp_path / f"{part}{key}"
            own.mkdir()
            run_dir = edited(good, own, put(f"{part}.{key}" if key else part, {"": 1} if not key else [1]))
            if found := faults(evaluate(forks, run_dir), refuses=True):
                told[f"{part}.{key}"] = found
            shutil.rmtree(own)
    assert not told, "\n".join(f"{name}: {found}" for name, found in told.items())


# --- values -------------------------------------------------------------------------------------


def swapped(config: dict[str, Any]) -> None:
    config["tokenizer"] |= {"alphabet": "${tokenizer.normaliser}", "normaliser": "${tokenizer.alphabet}"}


def tenfold(config: dict[str, Any]) -> None:
    config["model"] |= {f"z{i}": f"${{model.z{i - 1}}}" * 10 if i else "ab" * 5 for i in range(10)}
    config["tokenizer"]["alphabet"] = "${model.z9}"


REFUSED: dict[str, Change] = {
    "hidden 10^9": put("encoder.hidden", 10**9),
    "hidden 10^7": put("encoder.hidden", 10**7),
    "hidden 20000": put("encoder.hidden", 20_000),
    "hidden 2^63": put("encoder.hidden", 2**63),
    "hidden 400 digits": put("encoder.hidden", 10**400),
    "hidden -1": put("encoder.hidden", -1),
    "hidden 0": put("encoder.hidden", 0),
    "hidden a text": put("encoder.hidden", "x" * 100),
    "hidden a fraction": put("encoder.hidden", 1.5),
    "hidden not a number": put("encoder.hidden", float("nan")),
    "hidden null": put("encoder.hidden", None),
    "dropout infinite": put("encoder.dropout", float("inf")),
    "dropout of 7": put("encoder.dropout", 7),
    "pre_layers 10^8": put("encoder.pre_layers", 10**8),
    "layers 10^7": put("model.prediction.layers", 10**7),
    "embedding 10^12": put("model.prediction.embedding", 10**12),
    "joint 10^15": put("model.joint.hidden", 10**15),
    "stack_time 10^12": put("encoder.stack_time", 10**12),
    "splice 10^12": put("encoder.features.splice", 10**12),
    "pad_features_to 10^12": put("encoder.features.pad_features_to", 10**12),
    "n_fft 2^40": put("encoder.features.n_fft", 2**40),
    "mels 10^8": put("encoder.features.mels", 10**8),
    "hop of 0 s": put("encoder.features.hop_seconds", 0),
    "hop of 1e-300 s": put("encoder.features.hop_seconds", 1e-300),
    "window of 1e300 s": put("encoder.features.window_seconds", 1e300),
    "window of 10^6 s": put("encoder.features.window_seconds", 1e6),
    "sample_rate 10^12": put("data.sample_rate", 10**12),
    "sample_rate 0": put("data.sample_rate", 0),
    "no batch": put("data.valid_batch.count", 0),
    "10^9 utterances": put("data.valid.unheard.utterances", 10**9),
    "gaps of 1e9 s": put("data.valid.unheard.gap_seconds", [1e9, 1e9]),
    "gaps of 1e308 s": put("data.valid.unheard.gap_seconds", [0, 1e308]),
    "gaps of nothing": put("data.valid.unheard.gap_seconds", []),
    "10^9 words": put("data.valid.unheard.max_words", 10**9),
    "no words": put("data.valid.unheard.max_words", -5),
    "an alphabet of 10^7 letters": put("tokenizer.alphabet", "ab" * 5_000_000),
    "an alphabet of 10^5 letters": put("tokenizer.alphabet", "ab" * 50_000),
    "an alphabet of 20,000 characters": put("tokenizer.alphabet", "".join(map(chr, range(0x4E00, 0x9C20)))),
    "values that are each other": swapped,
    "values tenfold ten times": tenfold,
    "an unknown resolver": put("tokenizer.alphabet", "${no.such:1}"),
    "a resolver of Hydra's": put("tokenizer.alphabet", "${hydra:runtime.cwd}"),
    "a deep resolver": put("tokenizer.alphabet", "${oc.create:" * 300 + "x" + "}" * 300),
    "a decoded object": put("tokenizer.alphabet", "${oc.decode:'!!python/object/apply:os.getcwd []'}"),
    "an open brace": put("tokenizer.alphabet", "${"),
    "a part that is a list": put("model", [1]),
    "a part that is null": put("model", None),
    "a part that is a text": put("device", "cpu"),
    "a part that is another": put("model", "${encoder}"),
    "a part inside itself": put("model.joint", "${model}"),
    "no tokenizer": without("tokenizer"),
    "no data": without("data"),
    "no decoder": without("decoder"),
    "no class": without("encoder._target_"),
    "a trainer that is a list": put("trainer", [1]),
    "a seed that is a text": put("seed", "x"),
    "a key too many": put("extra", 1),
    "another format": put("format", 99),
    "a format of no number": put("format", [3]),
    "a key that is none": put("model", {7: 2, None: 3, True: 4}),
    "a run directory of another kind": put("run_dir", {"a": 1}),
    "a normaliser with a line break": put("tokenizer.normaliser", "a\nb\x1b[2J"),
}
EITHER: dict[str, Change] = {
    "10^9 symbols a step": put("decoder.max_symbols_per_step", 10**9),
    "10^6 workers": put("data.workers", 10**6),
    "a batch of 10^12": put("data.valid_batch.count", 10**12),
    "sample_rate 1": put("data.sample_rate", 1),
    "sample_rate 10^6": put("data.sample_rate", 10**6),
    "hop of 1 sample": put("encoder.features.hop_seconds", 1 / 16_000),
    "preemphasis 1e30": put("encoder.features.preemphasis", 1e30),
    "init_scale 1e308": put("encoder.init_scale", 1e308),
    "10^6 utterances of a word": several(
        put("data.valid.unheard.utterances", 10**6), put("data.valid.unheard.max_words", 1)
    ),
    "a trainer for ever": put("trainer.max_steps", 10**18),
    "a run directory elsewhere": put("run_dir", "/"),
    "a run directory with NUL": put("run_dir", "a\0b"),
    "a cache elsewhere": put("data.cache", "/proc/self/mem"),
    "a seed of 2^63": put("seed", 2**63),
}


def check_all(forks: Forks, good: Path, folder: Path, cases: dict[str, Change], refuses: bool | None) -> None:
    told = {}
    for name, change in cases.items():
        own = folder / "case"
        own.mkdir()
        if found := faults(evaluate(forks, edited(good, own, change)), refuses=refuses):
            told[name] = found
        shutil.rmtree(own)
    assert not told, "\n".join(f"{name}: {found}" for name, found in told.items())


@pytest.mark.timeout(1800)
def test_a_value_that_no_run_has_is_refused(forks: Forks, good: Path, tmp_path: Path) -> None:
    check_all(forks, good, tmp_path, REFUSED, True)


@pytest.mark.timeout(1800)
def test_a_value_that_is_strange_ends(forks: Forks, good: Path, tmp_path: Path) -> None:
    check_all(forks, good, tmp_path, EITHER, None)


def train(forks: Forks, run_dir: Path) -> Ended:
    return forks.run("train", f"run_dir={run_dir}", "dry_run=true")


EVALUATED = ("augment", "data", "decoder", "device", "encoder", "model", "precision", "tokenizer")
LEAVES: list[Any] = [None, [1], {"a": 1}, "\x1b[2J\u202e", -1, 10**400, float("nan")]
LEAVES.append({"_target_": "os.system"})


@pytest.mark.timeout(3600)
def test_every_key_of_another_type_is_one_line(forks: Forks, good: Path, tmp_path: Path) -> None:
    """Each key gets one of the strange values in turn, so that all of a key's siblings get each."""
    keys, told = [], {}

    def walk(node: dict[str, Any], prefix: str) -> None:
        for key, value in node.items():
            keys.append(prefix + key)
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")

    walk(yaml.safe_load((good / "config.yaml").read_text()), "")
    for number, key in enumerate(keys):
        for value in {number % len(LEAVES), (number * 3 + 1) % len(LEAVES)}:
            own = tmp_path / "case"
            own.mkdir()
            run_dir = edited(good, own, put(key, LEAVES[value]))
            is_read = key.partition(".")[0] in EVALUATED
            ended = evaluate(forks, run_dir) if is_read else train(forks, run_dir)
            if found := faults(ended):
                told[f"{key}: {ascii(LEAVES[value])[:40]}"] = found
            shutil.rmtree(own)
    assert not told, "\n".join(f"{name}: {found}" for name, found in told.items())


# --- text ---------------------------------------------------------------------------------------

LISTS = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)
MERGED = "a0: &a0 {k: v}\n" + "".join(
    f"a{i}: &a{i}\n  <<: [{','.join([f'*a{i - 1}'] * 10)}]\n  k{i}: {i}\n" for i in range(1, 12)
)
TEXTS: dict[str, str | bytes] = {
    "an object": "!!python/object/apply:os.system ['touch CANARY']\n",
    "a new object": "seed: !!python/object/new:os.system ['touch CANARY']\n",
    "a name": "tokenizer: !!python/name:os.system\n",
    "a module": "tokenizer: !!python/module:antigravity\n",
    "an unknown tag": "seed: !evil 1\n",
    "binary": "seed: !!binary AAAA\n",
    "a set": "? a\n? b\n",
    "pairs": "seed: !!omap [a: 1, a: 2]\n",
    "lists of lists": LISTS,
    "mappings of mappings": MERGED,
    "a list in itself": "a: &a [*a]\n",
    "a mapping in itself": "a: &a {b: *a}\n",
    "a merge of itself": "a: &a\n  <<: *a\n",
    "a mapping as key": "? {a: 1}\n: 2\n",
    "brackets": "a: " + "[" * 100_000,
    "keys of keys": "? " * 50_000,
    "dashes": "- " * 50_000,
    "500 levels": "a: " + "{b: " * 500 + "1" + "}" * 500,
    "anchors": "".join(f"a{i}: &b{i} 1\n" for i in range(100_000)),
    "documents": "--- 1\n" * 50_000,
    "comments": "#\n" * 500_000,
    "spaces": " " * 1_000_000,
    "quotes": "a: '" + "''" * 400_000,
    "nothing": "",
    "a list": "[1, 2]",
    "a word": "hello",
    "NUL": "a: \0b",
    "latin-1": b"a: \xff\xfe",
    "UTF-16": "seed: 1".encode("utf-16"),
    "UTF-32": "seed: 1".encode("utf-32"),
    "surrogates": b"a: \xed\xa0\x80",
    "10^7 letters": "a: " + "b" * 10**7,
    "keys twice": "seed: 1\nseed: 2\n",
    "keys that are numbers": "1: 2\n3.5: 4\ntrue: 5\nnull: 6\n2001-01-01: 7\n",
    "infinite": "seed: .inf\n",
    "1e999": "seed: 1e999\n",
    "a long number": "seed: " + "9" * 5_000,
    "sixties": "seed: " + "59:" * 3_000 + "1\n",
    "octal": "seed: 0o" + "7" * 5_000,
    "a date": "seed: 2001-99-99\n",
    "a tab": "\ta: b",
    "an escape": 'a: "\\e[31m\\u202e"\n',
    "a directive": "%YAML 9.9\n---\na: 1\n",
    "a digest": "# sha256 of what follows: 00\nseed: 1\n",
}


@pytest.mark.timeout(1800)
def test_a_text_that_is_no_config(forks: Forks, good: Path, tmp_path: Path) -> None:
    told = {}
    for name, text in TEXTS.items():
        own = tmp_path / "case"
        own.mkdir()
        run_dir, canary = written(good, own, text), tmp_path / "CANARY"
        page = ["--out", own / "out.html"]
        for command, more in {"evaluate": ["device.threads=1"], "report": page}.items():
            ended = forks.run(command, run_dir, *more, cwd=tmp_path)
            refuses = True if command == "evaluate" else None
            if found := faults(ended, refuses=refuses, canaries=[canary]):
                told[f"{name}: {command}"] = found
        shutil.rmtree(own)
    assert not told, "\n".join(f"{name}: {found}" for name, found in told.items())


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 * 2**30)


PLACES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "a terminal": lambda path: path.symlink_to("/dev/tty"),
    "10 GB": sparse,
    "a folder": lambda path: path.mkdir(),
    "a circle": lambda path: path.symlink_to(path.name),
    "a private file": lambda path: path.symlink_to("../id_rsa"),
    "nothing": lambda path: path.symlink_to("../none"),
    "no rights": lambda path: path.symlink_to("/proc/1/mem"),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_config_that_is_no_file(name: str, forks: Forks, good: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(good, run_dir)
    (run_dir / "config.yaml").unlink()
    (tmp_path / "id_rsa").write_text("hunter2: PRIVATE\n")
    PLACES[name](run_dir / "config.yaml")
    page = tmp_path / "out.html"
    for command, more in {"evaluate": [], "report": ["--out", page], "transcribe": ["a.wav"]}.items():
        ended = forks.run(command, run_dir, *more, seconds=20)
        refuses = None if command == "report" else True
        assert faults(ended, refuses=refuses, private=["PRIVATE"]) == [], command
        assert not page.exists() or "PRIVATE" not in page.read_text()
    train = forks.run("train", f"run_dir={run_dir}", seconds=20)
    assert faults(train, refuses=True, private=["PRIVATE"]) == []


SECRETS = ["${oc.env:MY_TOKEN}", "${ oc.env : MY_TOKEN }", "${oc.decode:${oc.env:MY_TOKEN}}"]


@pytest.mark.ci_share
@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_of_the_environment_is_not_printed(
    text: str, forks: Forks, good: Path, tmp_path: Path
) -> None:
    run_dir = edited(good, tmp_path, put("tokenizer.alphabet", text))
    ended = forks.run("evaluate", run_dir, environment={"MY_TOKEN": "hunter2hunter2"})
    assert faults(ended, refuses=True, private=["hunter2"]) == []
