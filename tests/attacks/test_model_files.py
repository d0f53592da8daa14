"""Models of other systems, as a stranger sends them: export and init_from run and keep nothing of his."""

from __future__ import annotations

import builtins
import functools
import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.hostile_pickles import Calls, doubled, saved, tenfold

from .forks import Ended, Forks, faults

pytest.importorskip("transformers")


def zipped(content: bytes, *more: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in (("archive/data.pkl", content), ("archive/version", b"3\n"), *more):
            with warnings.catch_warnings(action="ignore"):  # of names that are there twice
                archive.writestr(name, data)
    return buffer.getvalue()


def check(forks: Forks, source: Path, form: str, canary: Path, *more: object) -> list[str]:
    """What is wrong with how an export of ``source`` ended, which must refuse it and leave nothing."""
    out = canary.with_name("out")
    ended = forks.run("export", source, "--from", form, "--out", out, *more, seconds=180)
    left = ["something was left at --out"] if os.path.lexists(out) else []
    shutil.rmtree(out, ignore_errors=True)
    return [*faults(ended, refuses=True, canaries=[canary]), *left]


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 10 * 2**30)


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


CALLS: dict[str, Callable[[str], object]] = {
    "os.system": lambda path: Calls(os.system, f"touch {path}"),
    "subprocess.Popen": lambda path: Calls(subprocess.Popen, ["touch", path]),
    "eval": lambda path: Calls(eval, f"open({path!r}, 'w')"),
    "exec": lambda path: Calls(exec, f"open({path!r}, 'w')"),
    "open": lambda path: Calls(builtins.open, path, "w"),
    "getattr": lambda path: Calls(getattr, Path, "touch"),
    "functools.partial": lambda path: Calls(functools.partial, os.system, f"touch {path}"),
    "torch.load": lambda path: Calls(torch.load, path),
    "torch.hub": lambda path: Calls(torch.hub.load, path, "x", "local"),
    "bytes": lambda path: Calls(bytes, 2**40),
    "bytearray": lambda path: Calls(bytearray, 2**40),
    "range": lambda path: Calls(list, range(10**9)),
}
NAMES = [
    *(
        "numpy load",
        "numpy.core.multiarray _reconstruct",
        "torch load",
        "torch._utils _rebuild_sparse_tensor",
    ),
    *("torch._utils _rebuild_device_tensor_from_numpy", "torch.hub load", "speechtrain.config.build build"),
    *("collections OrderedDict.__reduce__", "builtins __import__", "__builtin__ eval", "site main"),
    *("nt system", "posix system", "_posixsubprocess fork_exec", "ctypes CDLL", "runpy _run_code"),
    *("pip._internal main", "operator attrgetter", "_io open", "importlib import_module", "types CodeType"),
    *("pathlib Path.write_text", "builtins getattr", "os.path join", "torch.distributed TCPStore"),
    *(
        "webbrowser open",
        "antigravity x",
        "shutil rmtree",
        "torch.jit load",
        "torch.storage _load_from_bytes",
    ),
    *("torch FloatStorage", "copyreg _reconstructor", "builtins bytearray", "torch._C _jit_override"),
]


def test_a_pickle_that_calls(forks: Forks, tmp_path: Path) -> None:
    canary, told = tmp_path / "canary", {}
    for name, make in CALLS.items():
        call = make(str(canary))
        for number, content in enumerate(
            (
                zipped(pickle.dumps({"model": {"mask_emb": call}, "cfg": call}, 2)),
                zipped(pickle.dumps({"model": {"mask_emb": call}, "cfg": call}, 4)),
                pickle.dumps(call, 2),
                zipped(pickle.dumps(call, 2), compression=zipfile.ZIP_DEFLATED),
                zipped(pickle.dumps({}, 2), ("archive/data.pkl", pickle.dumps(call, 2))),
                zipped(pickle.dumps({}, 2), ("other/data.pkl", pickle.dumps(call, 2))),
                first_entry(b"archive/xdata.pkl", pickle.dumps({}, 2), pickle.dumps(call, 2)),
            )
        ):
            (tmp_path / "m.pt").write_bytes(content)
            if found := check(forks, tmp_path / "m.pt", "fairseq", canary):
                told[f"{name} {number}"] = found
    for name in NAMES:
        argument = f"touch {canary}".encode()
        text = b"X" + struct.pack("<I", len(argument)) + argument
        (tmp_path / "m.pt").write_bytes(zipped(b"\x80\x02" + named(*name.split()) + text + b"\x85R."))
        if found := check(forks, tmp_path / "m.pt", "fairseq", canary):
            told[name] = found
    assert not told, "\n".join(f"{name}: {found}" for name, found in told.items())


def first_entry(name: bytes, harmless: bytes, harmful: bytes) -> bytes:
    """An archive whose first pickle is not the one that is read."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name.decode(), harmless)
        archive.writestr("archive/data.pkl", harmful)
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def several(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


SETS, PAIRS = b"(h%ch%cK\x01\x91\x94", [(i, i) for i in range(200)]


def weights(**named: object) -> bytes:
    return saved({"model": named, "cfg": {"model": {}}})


BOMBS: dict[str, bytes] = {
    "lists of lists": zipped(pickle.dumps({"model": {"mask_emb": 1}, "cfg": {"model": tenfold(9)}}, 2)),
    "a list in itself": zipped(several(b"}(X\x05\0\0\0modelK\x01X\x03\0\0\0cfg]q\0h\0au")),
    "the object 2^31": zipped(several(b"Nr\xff\xff\xff\x7f")),
    "the object 3e8": zipped(several(b"Nr" + struct.pack("<I", 3 * 10**8))),
    "2^62 bytes": zipped(b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"."),
    "a text of 2^31": zipped(several(b"X" + struct.pack("<I", 2**31 - 1))),
    "a number of 2^31 bytes": zipped(several(b"\x8b" + struct.pack("<i", 2**31 - 1))),
    "a number of 10^6 bytes": zipped(several(b"\x8b" + struct.pack("<i", 10**6) + b"\x7f" * 10**6)),
    "a number of 10^6 digits": zipped(several(b"I" + b"9" * 10**6 + b"\n")),
    "tuples in tuples": zipped(several(b"(" * 10**6 + b"t" * 10**6)),
    "lists in lists": zipped(several(b"]" * 10**6 + b"a" * (10**6 - 1))),
    "names": zipped(several(named("x", "Y") * 10**5)),
    "sets in sets": zipped(
        b"\x80\x04(\x91\x94" + b"".join(b"(h%ch%cK\x01\x91\x94" % (i, i) for i in range(200)) + b"."
    ),
    "a tuple doubled": zipped(doubled(40)),
    "a decoy, then a tuple doubled": first_entry(b"archive/xdata.pkl", pickle.dumps({}, 2), doubled(40)),
    "a dictionary of itself": zipped(several(b"}q\0h\0h\0s")),
    "half": zipped(pickle.dumps({"a": 1}))[:100],
    "nothing": b"",
    "rubbish": b"\x93\xfe" * 500,
    "a zip of rubbish": b"PK\x03\x04" + b"\x93\xfe" * 500,
    "a pickle of rubbish": b"\x80\x02" + b"\x93\xfe" * 500,
    "no pickle": zipped(b"").replace(b"data.pkl", b"datx.pkl"),
    "names with ..": zipped(pickle.dumps({"a": 1}, 2), ("../../evil", b"x"), ("/etc/evil", b"x")),
    "a list": saved([1, 2]),
    "a tensor": saved(torch.zeros(3)),
    "a model in a list": saved({"model": [1], "cfg": {}}),
    "keys of numbers": saved({"model": {1: torch.zeros(2), None: 2}, "cfg": {"model": {}}}),
    "weights of texts": weights(mask_emb="x"),
    "weights that are large": saved(
        {"model": {"mask_emb": torch.zeros(1).expand(2**40)}, "cfg": {"model": {}}}
    ),
    "weights of 3 GB": saved(
        {"model": {"mask_emb": torch.zeros(1).expand(800_000_000)}, "cfg": {"model": {}}}
    ),
    "weights that are nowhere": weights(mask_emb=torch.empty(2**40, device="meta")),
    "sparse weights": weights(mask_emb=torch.eye(3).to_sparse()),
    "complex weights": saved(
        {"model": {"mask_emb": torch.zeros(8, dtype=torch.complex64)}, "cfg": {"model": {}}}
    ),
    "names with escapes": saved(
        {"model": {"mask_emb": torch.zeros(8), "\x1b[2J\u202e": 1}, "cfg": {"model": {}}}
    ),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_that_is_a_bomb(name: str, forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(BOMBS[name])
    assert check(forks, tmp_path / "m.pt", "fairseq", tmp_path / "canary") == []


CONV = {"conv_feature_layers": "[(8,10,5)]"}
SETTINGS: dict[str, Any] = {
    "a product": {"conv_feature_layers": "[(512,10,5)]*64*64*64*64*64"},
    "a product of lists": {"conv_feature_layers": "[(512,10,5)]*[1]"},
    "10^5 times one": {"conv_feature_layers": "[(512,10,5)]" + "*1" * 10**5},
    "a sum": {"conv_feature_layers": "+".join(["[(512,10,5)]*1000"] * 1000)},
    "brackets": {"conv_feature_layers": "(" * 10**5},
    "minus signs": {"conv_feature_layers": "[(512,10," + "-" * 10**5 + "5)]"},
    "not": {"conv_feature_layers": "[(512,10," + "not " * 10**4 + "5)]"},
    "a power": {"conv_feature_layers": "[(512,10,5)]*10**10"},
    "a shift": {"conv_feature_layers": "[(512,10,1<<10**9)]"},
    "an attribute": {"conv_feature_layers": "().__class__.__base__"},
    "a call": {"conv_feature_layers": "__import__('os').system('touch CANARY')"},
    "a lambda": {"conv_feature_layers": '(lambda: exec(\'open("CANARY","w")\'))()'},
    "a comprehension": {"conv_feature_layers": "[(8,10,5) for _ in range(10**9)]"},
    "a text of text": {"conv_feature_layers": 'f\'{open("CANARY","w")}\''},
    "10^7 letters": {"conv_feature_layers": "a" * 10**7},
    "texts": {"conv_feature_layers": "'x'*64*64"},
    "digits": {"conv_feature_layers": "[(" + "9" * 10**5 + ",1,1)]"},
    "NUL": {"conv_feature_layers": "[(8,10,5)]\0"},
    "an escape": {"conv_feature_layers": "\x1b[2J"},
    "a list of lists": {"conv_feature_layers": [[8, 10]] * 3},
    "nothing": {"conv_feature_layers": None},
    "latent_temp in brackets": {**CONV, "latent_temp": "(" * 10**5},
    "latent_temp in minus signs": {**CONV, "latent_temp": "(" + "-" * 10**5 + "5,)"},
    "latent_temp that calls": {**CONV, "latent_temp": "exec('1')"},
    "latent_temp infinite": {**CONV, "latent_temp": "(1e999,1,1)"},
    "10^8 layers": {**CONV, "encoder_layers": 10**8, "encoder_embed_dim": 8, "encoder_attention_heads": 1},
    "10^400 layers": {**CONV, "encoder_layers": 10**400},
    "layers in a list": {**CONV, "encoder_layers": [1]},
    "layers before none": {**CONV, "encoder_layers": -1},
    "a width of 10^12": {**CONV, "encoder_embed_dim": 10**12},
    "a width that is a fraction": {**CONV, "encoder_embed_dim": 7.5},
    "no heads": {**CONV, "encoder_attention_heads": 0},
    "heads of nothing": {**CONV, "encoder_attention_heads": float("nan")},
    "a kernel of 10^12": {"conv_feature_layers": "[(8,1000000000000,5)]"},
    "a stride of 0": {"conv_feature_layers": "[(8,10,0)]"},
    "a dropout that is none": {**CONV, "dropout": float("nan")},
    "a dropout in words": {**CONV, "dropout": "x"},
    "10^12 codes": {**CONV, "latent_vars": 10**12},
    "10^9 groups": {**CONV, "latent_groups": 10**9},
    "a position kernel of 10^12": {**CONV, "conv_pos": 10**12},
    "a model in a model": {"w2v_args": {"model": {"w2v_args": {"model": CONV}}}},
    "an activation": {**CONV, "activation_fn": "__import__"},
    "settings in a list": [1, 2],
    "settings in words": "x" * 10**6,
}


@pytest.mark.timeout(600)
def test_settings_of_fairseq(forks: Forks, tmp_path: Path) -> None:
    canary, told = tmp_path / "canary", {}
    for name, settings in SETTINGS.items():
        text = settings.get("conv_feature_layers") if isinstance(settings, dict) else None
        if isinstance(text, str):
            settings = {**settings, "conv_feature_layers": text.replace("CANARY", str(canary))}
        parts = {"model": settings, "task": {}, "criterion": {}}
        content = {"model": {"mask_emb": torch.zeros(8)}, "cfg": parts}
        for key in ("cfg", "args"):
            torch.save({**content, key: parts}, tmp_path / "m.pt")
            if found := check(forks, tmp_path / "m.pt", "fairseq", canary):
                told[f"{name} {key}"] = found
    assert not told, "\n".join(f"{name}: {found}" for name, found in told.items())


# --- Hugging Face -------------------------------------------------------------------------------

SMALL = {
    "model_type": "wav2vec2",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
    "conv_dim": [8],
    "conv_kernel": [10],
    "conv_stride": [5],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 1,
}
REMOTE = {"AutoModel": "strange.Strange", "AutoConfig": "strange.Strange"}
CONFIGS: dict[str, Any] = {
    "nested": "[" * 10**5,
    "nothing": "",
    "a list": "[]",
    "NUL": "\0",
    "not UTF-8": "\udcff",
    "a long number": '{"model_type":"wav2vec2","hidden_size":' + "9" * 5_000 + "}",
    "400 digits": {"hidden_size": 10**400},
    "infinite": '{"model_type":"wav2vec2","hidden_size":1e999}',
    "another model": {"model_type": "bert"},
    "a model of no name": {"model_type": [1]},
    "a model that is a path": {"model_type": "../../x"},
    "10^8 layers": {"num_hidden_layers": 10**8},
    "layers before none": {"num_hidden_layers": -1},
    "a width of 10^12": {"hidden_size": 10**12},
    "a width in words": {"hidden_size": "x"},
    "10^6 convolutions": {"conv_dim": [8] * 10**6, "conv_kernel": [1] * 10**6, "conv_stride": [1] * 10**6},
    "a convolution of 10^12": {"conv_kernel": [10**12]},
    "convolutions as a number": {"conv_dim": 5},
    "remote code": {"auto_map": REMOTE, "trust_remote_code": True},
    "remote code elsewhere": {
        "auto_map": {"AutoConfig": "evil/repository--strange.Strange"},
        "model_type": "strange",
    },
    "quantised": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
    "quantised by a module": {"quantization_config": {"quant_method": "strange", "modules": [1]}},
    "a kernel of a hub": {"_attn_implementation": "evil/kernel", "attn_implementation": "evil/kernel"},
    "a name elsewhere": {"_name_or_path": "http://127.0.0.1:1/x", "base_model_name_or_path": "/etc"},
    "an activation": {"hidden_act": "__import__('os').system('true')"},
    "architectures": {"architectures": ["os.system"], "torch_dtype": "os.system"},
    "adapters": {"add_adapter": True, "num_adapter_layers": 10**8, "adapter_attn_dim": 10**9},
    "a vocabulary of 10^12": {"vocab_size": 10**12, "architectures": ["Wav2Vec2ForCTC"]},
    "escapes": {"model_type": "\x1b[2J\u202e"},
}


def folder_of(tmp_path: Path, config: Any, files: dict[str, Any]) -> Path:
    folder = tmp_path / "hf"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    text = config if isinstance(config, str) else json.dumps({**SMALL, **config})
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    ran = f"open({str(tmp_path / 'canary')!r}, 'w')\nclass Strange: pass\n"
    (folder / "strange.py").write_text(ran)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "x", "auto_mapping": null}')
    for name, content in files.items():
        if callable(content):
            content(folder / name)
        else:
            (folder / name).write_bytes(content)
    return folder


def header(content: object, data: bytes = b"") -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"wav2vec2.masked_spec_embed": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}}


NOTHING = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
WEIGHTS: dict[str, bytes] = {
    "nothing": b"",
    "rubbish": b"\x07" * 100,
    "a header of 2^63": struct.pack("<Q", 2**63) + b"{}",
    "a header of 10^8 spaces": header(b"{" + b" " * (10**8 - 10) + b"}"),
    "a header of 10^9, sparse": struct.pack("<Q", 10**9) + b"{",
    "a nested header": header(b'{"a":' * 10**6),
    "a shape of 2^62": header(tensor([2**62], 0, 4), b"\0" * 4),
    "a shape that overflows": header(tensor([2**32, 2**32], 0, 0)),
    "a shape of no size": header(tensor([0, 2**63 - 1], 0, 0)),
    "10^6 dimensions": header(tensor([1] * 10**6, 0, 4), b"\0" * 4),
    "offsets backwards": header(tensor([1], 4, 0), b"\0" * 4),
    "offsets beyond": header(tensor([1], 0, 2**60), b"\0" * 4),
    "an unknown type": header(tensor([1], 0, 4, "X"), b"\0" * 4),
    "eight bits": header(tensor([8], 0, 8, "F8_E4M3"), b"\0" * 8),
    "texts": header({"wav2vec2.masked_spec_embed": "x"}),
    "10^5 tensors": header(
        {f"a{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(10**5)}
    ),
    "names with escapes": header(
        {"\x1b[2J\u202e": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4
    ),
    "long metadata": header({"__metadata__": {"a": "b" * 10**6}}),
}


def whole(path: Path) -> None:
    save_file({"wav2vec2.masked_spec_embed": torch.zeros(8)}, path)


def called(canary: Path) -> bytes:
    return zipped(pickle.dumps({"wav2vec2.masked_spec_embed": Calls(os.system, f"touch {canary}")}, 2))


@pytest.mark.timeout(600)
def test_configs_of_hugging_face(forks: Forks, tmp_path: Path) -> None:
    told = {}
    for name, config in CONFIGS.items():
        folder = folder_of(tmp_path, config, {"model.safetensors": whole})
        if found := check(forks, folder, "huggingface", tmp_path / "canary"):
            told[name] = found
    assert not told, "\n".join(f"{name}: {found}" for name, found in told.items())


@pytest.mark.timeout(600)
def test_weights_of_hugging_face(forks: Forks, tmp_path: Path) -> None:
    told, canary, index = {}, tmp_path / "canary", "model.safetensors.index.json"

    def mapped(*names: str) -> bytes:
        return json.dumps({"weight_map": {f"a{i}": name for i, name in enumerate(names)}}).encode()

    cases: dict[str, dict[str, Any]] = {
        name: {"model.safetensors": content} for name, content in WEIGHTS.items()
    }
    cases |= {
        "a pickle": {"pytorch_model.bin": called(canary)},
        "a pickle by its index": {"pytorch_model.bin.index.json": mapped("x.bin"), "x.bin": called(canary)},
        "a pickle by another index": {index: mapped("x.bin"), "x.bin": called(canary)},
        "an index elsewhere": {index: mapped("../../../../etc/passwd", "/etc/passwd", "..", ".")},
        "an index of 10^5 files": {index: mapped(*(f"{i}.safetensors" for i in range(10**5)))},
        "an index of numbers": {index: b'{"weight_map": {"a": 5}}'},
        "an index in a list": {index: b'{"weight_map": [1]}'},
        "an index with NUL": {index: mapped("a\0b")},
        "a nested index": {index: b"[" * 10**5},
        "a long number in an index": {index: b'{"weight_map": ' + b"9" * 5_000 + b"}"},
        "a pipe as index": {index: os.mkfifo},
        "zeros as index": {index: lambda path: path.symlink_to("/dev/zero")},
        "zeros": {"model.safetensors": lambda path: path.symlink_to("/dev/zero")},
        "a pipe": {"model.safetensors": os.mkfifo},
        "a folder": {"model.safetensors": lambda path: path.mkdir()},
        "a circle": {"model.safetensors": lambda path: path.symlink_to(path.name)},
        "10 GB": {
            "model.safetensors": lambda path: (
                os.truncate(path, 10 * 2**30) if path.write_bytes(b"") == 0 else None
            )
        },
        "no weights": {},
    }
    for name, files in cases.items():
        if found := check(forks, folder_of(tmp_path, {}, files), "huggingface", canary):
            told[name] = found
    assert not told, "\n".join(f"{name}: {found}" for name, found in told.items())


def begin(forks: Forks, source: Path, run_dir: Path) -> Ended:
    """A run with initial weights."""
    line = ["model=rnnt_small", "trainer.max_steps=1", "data.train.utterances=20", "data.workers=0"]
    line += ["data.valid.unheard.utterances=3", "launcher=local", "launcher.inline=true", "device.threads=1"]
    return forks.run("train", *line, f"init_from={source}", f"run_dir={run_dir}", seconds=180)


KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "a circle": lambda path: path.symlink_to(path.name),
    "10 GB": sparse,
    "a name that is long": lambda path: path.symlink_to("x" * 255),
}


@pytest.mark.ci_share
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_no_file(kind: str, forks: Forks, tmp_path: Path) -> None:
    """By export, and as the initial weights of a run."""
    KINDS[kind](tmp_path / "m.pt")
    assert check(forks, tmp_path / "m.pt", "fairseq", tmp_path / "canary") == []
    assert check(forks, tmp_path / "m.pt", "huggingface", tmp_path / "canary") == []
    ended = begin(forks, tmp_path / "m.pt", tmp_path / "run")
    assert faults(ended, refuses=True) == []


@pytest.mark.timeout(600)
def test_a_model_as_initial_weights(forks: Forks, tmp_path: Path, good: Path) -> None:
    """The same readers behind another command, and a stranger's run and its checkpoint."""
    canary, told = tmp_path / "canary", {}
    shutil.copytree(good, tmp_path / "good")
    (tmp_path / "good" / "config.yaml").write_text("tokenizer: {_target_: os.system}\n")
    sources: dict[str, bytes | Path] = {
        "a call": zipped(pickle.dumps({"model": Calls(os.system, f"touch {canary}")}, 2)),
        "a bomb": zipped(doubled(40)),
        "a header": b"\xff" * 7 + b"\x7f{",
        "a safetensors header": header(tensor([2**62], 0, 4), b"\0" * 4),
        "a run": tmp_path / "good",
        "a checkpoint": next((tmp_path / "good" / "checkpoints").glob("step-*")),
        "hugging face": folder_of(tmp_path, {"auto_map": REMOTE}, {"pytorch_model.bin": called(canary)}),
    }
    for name, content in sources.items():
        source = content if isinstance(content, Path) else tmp_path / "m.pt"
        if isinstance(content, bytes):
            source.write_bytes(content)
        run = tmp_path / "run"
        ended = begin(forks, source, run)
        refuses = None if name in ("a run", "a checkpoint") else True
        if found := faults(ended, refuses=refuses, canaries=[canary]):
            told[name] = found
        shutil.rmtree(run, ignore_errors=True)
    assert not told, "\n".join(f"{name}: {found}" for name, found in told.items())
