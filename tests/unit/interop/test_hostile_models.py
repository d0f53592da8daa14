"""Models of a stranger: what is small in a file and large or endless in memory is one line."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from speechtrain.checkpoint.whole import WEIGHTS, Checkpointer
from speechtrain.errors import ConfigError, DataError, RunError
from speechtrain.interop import fairseq, huggingface
from speechtrain.interop.pickles import plain, read_pickle
from speechtrain.interop.wav2vec2 import MOST_LAYERS, Pretrained


def zipped(content: bytes, storage: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", storage)
    return buffer.getvalue()


def doubled(levels: int) -> bytes:
    """A tuple of a tuple twice, and so on, as a dictionary's key: its hash takes 2^levels steps."""
    level = b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(levels))
    return b"\x80\x02K\x01\x85q\x00" + level + b"}h" + bytes([levels]) + b"K\x01s."


PICKLES = {
    "a tuple doubled 40 times": doubled(40),
    "an object with the number 3e8": b"\x80\x02Nr" + struct.pack("<I", 3 * 10**8) + b".",
    "an object with the number 2^31": b"\x80\x02Nr" + struct.pack("<I", 2**31 - 1) + b".",
    "a text longer than the file": b"\x80\x02X" + struct.pack("<I", 2**31 - 1) + b".",
    "tuples nested 10^5 deep": b"\x80\x02" + b"(" * 10**5 + b"t" * 10**5 + b".",
    "marks alone": b"\x80\x02" + b"(" * 100 + b".",
    "a stack that is empty": b"\x80\x02\x86\x86q\x00.",
    "a number of 5,000 digits": b"\x80\x02p" + b"9" * 5_000 + b"\n.",
    "nothing": b"",
}


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.timeout(30)
def test_a_pickle_that_is_a_bomb_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(zipped(PICKLES[name]))
    with pytest.raises(DataError, match=r"a\.pt"):
        fairseq.read(path)


def test_a_pickle_with_shared_parts_is_read(tmp_path: Path) -> None:
    shared = {"betas": (0.9, 0.98)}
    content = {
        "cfg": [shared] * 1_000,
        "model": {f"w{i}": torch.ones(2) for i in range(200)},
        "k": {(1, 2): 3},
    }
    for is_zip in (True, False):
        torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
        assert read_pickle(tmp_path / "a.pt")["cfg"] == content["cfg"]


@pytest.mark.timeout(30)
def test_settings_that_repeat_one_another_are_refused() -> None:
    laughs: list[Any] = ["x"]
    for _ in range(9):
        laughs = [laughs] * 10
    endless: list[Any] = []
    endless.append(endless)
    for settings in (laughs, {"model": laughs}, endless):
        with pytest.raises(DataError, match="themselves, or too many"):
            plain(settings)
    assert plain([[["x"] * 10] * 10] * 10) == [[["x"] * 10] * 10] * 10


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
@pytest.mark.timeout(30)
def test_a_pipe_or_a_device_as_model_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "a.pt")
    with pytest.raises(DataError, match="not a regular file"):
        read_pickle(tmp_path / "a.pt")
    make(tmp_path / "config.json")
    with pytest.raises(DataError, match="not a regular file"):
        huggingface._config(tmp_path)


CONV = "[(8,10,5)]"
SETTINGS: dict[str, dict[str, Any]] = {
    "a product": {"conv_feature_layers": "[(512,10,5)]*64*64*64*64*64"},
    "a power": {"conv_feature_layers": "[(512,10,5)]*10**10"},
    "10^5 times one": {"conv_feature_layers": "[(512,10,5)]" + "*1" * 10**5},
    "10^5 brackets": {"conv_feature_layers": "(" * 10**5},
    "10^5 minus signs": {"conv_feature_layers": "[(512,10," + "-" * 10**5 + "5)]"},
    "9,000 minus signs": {"conv_feature_layers": "[(512,10," + "-" * 9_000 + "5)]"},
    "digits": {"conv_feature_layers": "[(" + "9" * 10**5 + ",1,1)]"},
    "temperatures of minus signs": {"conv_feature_layers": CONV, "latent_temp": "(" + "-" * 10**5 + "5,)"},
    "10^8 layers": {"conv_feature_layers": CONV, "encoder_layers": 10**8, "encoder_attention_heads": 1},
    "10^400 layers": {"conv_feature_layers": CONV, "encoder_layers": 10**400},
    "a width of 10^12": {"conv_feature_layers": CONV, "encoder_embed_dim": 10**12},
    "an infinite width": {"conv_feature_layers": CONV, "encoder_embed_dim": float("inf")},
    "a kernel of 10^12": {"conv_feature_layers": "[(8,1000000000000,5)]"},
    "no heads": {"conv_feature_layers": CONV, "encoder_attention_heads": 0},
    "10^18 codes": {"conv_feature_layers": CONV, "latent_vars": 10**18},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.timeout(30)
def test_fairseq_settings_without_bound_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.pt"
    cfg = {"model": SETTINGS[name], "task": {}, "criterion": {}}
    torch.save({"model": {"mask_emb": torch.zeros(8)}, "cfg": cfg}, path)
    with pytest.raises(DataError, match=r"a\.pt") as caught:
        fairseq.read(path)
    assert len(str(caught.value)) < 500


CONFIGS: dict[str, Any] = {
    "10^8 layers": {"num_hidden_layers": 10**8},
    "a width of 10^12": {"hidden_size": 10**12},
    "an infinite width": '{"model_type": "wav2vec2", "hidden_size": 1e999}',
    "a width in words": {"hidden_size": "x"},
    "10^5 convolutions": {"conv_dim": [8] * 10**5, "conv_kernel": [1] * 10**5, "conv_stride": [1] * 10**5},
    "convolutions as a number": {"conv_dim": 5},
    "nested": "[" * 10**5,
    "a number of 5,000 digits": '{"model_type": ' + "9" * 5_000 + "}",
    "no UTF-8": b"\xff\xfe{}",
    "a list": "[]",
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.timeout(60)
def test_hugging_faces_config_without_bound_is_refused(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    found = CONFIGS[name]
    small = {"model_type": "wav2vec2", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    text = json.dumps({**small, **found}) if isinstance(found, dict) else found
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    save_file({"wav2vec2.masked_spec_embed": torch.zeros(8)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"config\.json"):
        huggingface.read(tmp_path)


def test_layers_are_counted_before_they_are_built() -> None:
    for encoder in (
        {"layers": MOST_LAYERS + 1, "conv_layers": []},
        {"layers": 1, "conv_layers": [[1]] * 2_000},
    ):
        with pytest.raises(ConfigError, match="the most are"):
            Pretrained(encoder, {}, {}).shapes()


def header(content: object, data: bytes = b"") -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}}


SAFETENSORS = {
    "empty": b"",
    "rubbish": b"\x07" * 100,
    "a header of 2^63": struct.pack("<Q", 2**63) + b"{}",
    "a header nested 10^5": struct.pack("<Q", 500_000) + b'{"a":' * 10**5,
    "a shape of 2^62": header(tensor([2**62], 0, 4), b"\0" * 4),
    "a shape that overflows": header(tensor([2**32, 2**32], 0, 0)),
    "offsets backwards": header(tensor([1], 4, 0), b"\0" * 4),
    "an unknown type": header(tensor([1], 0, 4, "X"), b"\0" * 4),
    "no object": header([1]),
}


@pytest.mark.parametrize("name", SAFETENSORS)
def test_signed_weights_that_are_damaged_are_one_line(tmp_path: Path, name: str) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {}, {"a": torch.zeros(1)})
    [folder] = checkpointer.folders()
    (folder / WEIGHTS).write_bytes(SAFETENSORS[name])
    sign(folder)
    with pytest.raises(RunError, match=r"model\.safetensors cannot be read"):
        checkpointer.weights()
    with pytest.raises(DataError, match=r"model\.safetensors cannot be read"):
        huggingface.read_safetensors(folder / WEIGHTS)


def sign(folder: Path) -> None:
    """Give a checkpoint's manifest the digests of its files, as a stranger can."""
    held = json.loads((folder / "checkpoint.json").read_text())
    held.pop("sha256", None)
    held["files"] = {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in held["files"]}
    own = hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()
    (folder / "checkpoint.json").write_text(json.dumps({**held, "sha256": own}))


def saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content", [b"rubbish", b"", pickle.dumps({"a": os.system}, 2), saved([1]), saved(None)]
)
def test_a_signed_state_that_is_damaged_is_one_line(tmp_path: Path, content: bytes) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {}, {"a": torch.zeros(1)})
    [folder] = checkpointer.folders()
    (folder / "state.pt").write_bytes(content)
    sign(folder)
    with pytest.raises(RunError, match="step-00000001"):
        checkpointer.restore({})


@pytest.mark.parametrize("content", ["[" * 10**5, "[]", "5", "{}", '{"step": ' + "9" * 5_000 + "}", "\udcff"])
def test_a_checkpoint_manifest_of_anything_is_one_line(tmp_path: Path, content: str) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {}, {"a": torch.zeros(1)})
    [folder] = checkpointer.folders()
    for name in ("checkpoint.json", "../best.json"):
        (folder / name).write_text(content, errors="surrogateescape")
    with pytest.raises(RunError, match=r"checkpoint\.json"):
        checkpointer.weights()
