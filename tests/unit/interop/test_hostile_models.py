"""Models of a stranger: what is small in a file and large or endless in memory is one line."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from speechtrain.checkpoint.whole import WEIGHTS, Checkpointer, read_state
from speechtrain.errors import ConfigError, DataError, RunError
from speechtrain.files import names_in_archive
from speechtrain.interop import wav2vec2_fairseq, wav2vec2_hf
from speechtrain.interop.pickles import plain_settings, read_pickle, tensors_of
from speechtrain.interop.pretrained import MOST_LAYERS, Pretrained
from tests.support.checkpoints import restore


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
        wav2vec2_fairseq.read(path)


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
            plain_settings(settings)
    assert plain_settings([[["x"] * 10] * 10] * 10) == [[["x"] * 10] * 10] * 10


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
@pytest.mark.timeout(30)
def test_a_pipe_or_a_device_as_model_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "a.pt")
    with pytest.raises(DataError, match="not a regular file"):
        read_pickle(tmp_path / "a.pt")
    make(tmp_path / "config.json")
    with pytest.raises(DataError, match="not a regular file"):
        wav2vec2_hf._read_config(tmp_path)


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
        wav2vec2_fairseq.read(path)
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
        wav2vec2_hf.read(tmp_path)


def test_read_refuses_a_mask_embedding_that_is_no_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"model": {"mask_emb": "x"}, "cfg": {"model": {}}}, path)
    with pytest.raises(DataError, match=r"has no wav2vec 2\.0 model"):
        wav2vec2_fairseq.read(path)


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
        wav2vec2_hf.read_safetensors(folder / WEIGHTS)


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
        restore(checkpointer, {})


@pytest.mark.parametrize("content", ["[" * 10**5, "[]", "5", "{}", '{"step": ' + "9" * 5_000 + "}", "\udcff"])
def test_a_checkpoint_manifest_of_anything_is_one_line(tmp_path: Path, content: str) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {}, {"a": torch.zeros(1)})
    [folder] = checkpointer.folders()
    for name in ("checkpoint.json", "../best.json"):
        (folder / name).write_text(content, errors="surrogateescape")
    with pytest.raises(RunError, match=r"checkpoint\.json"):
        checkpointer.weights()


def archive(path: Path, *names: str, compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name in names:
            is_pickle = name.lower().endswith("pkl")
            archive.writestr(name, pickle.dumps({}, 2) * is_pickle or b"0" * 100)


LAYOUTS = {
    "no data.pkl": ("archive/version",),
    "a data.pkl in capitals": ("archive/DATA.PKL",),
    "a second data.pkl in capitals": ("archive/DATA.PKL", "archive/x/data.pkl"),
    "a second data.pkl below": ("archive/data.pkl", "archive/x/data.pkl"),
    "a data.pkl that is not the first": ("other/version", "archive/data.pkl"),
    "a data.pkl in an inner folder": ("archive/x/data.pkl",),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_archive_with_another_data_pkl_is_refused(tmp_path: Path, name: str) -> None:
    archive(tmp_path / "a.pt", *LAYOUTS[name])
    with pytest.raises(DataError, match="its first entry is not its only"):
        read_pickle(tmp_path / "a.pt")
    with pytest.raises(zipfile.BadZipFile, match="its first entry is not its only"):
        names_in_archive(tmp_path / "a.pt")


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_entries_are_refused_before_their_checksums_are_read(
    tmp_path: Path, compression: int
) -> None:
    archive(tmp_path / "a.pt", "archive/data.pkl", "archive/data/0", compression=compression)
    content = (tmp_path / "a.pt").read_bytes()
    damaged = content.replace(struct.pack("<I", zlib.crc32(b"0" * 100)), b"\1\2\3\4")
    assert damaged != content
    (tmp_path / "a.pt").write_bytes(damaged)
    with pytest.raises(DataError, match="entries are compressed or overlap"):
        read_pickle(tmp_path / "a.pt")


def test_entries_that_overlap_are_refused(tmp_path: Path) -> None:
    archive(tmp_path / "a.pt", "archive/data.pkl", "archive/data/0", "archive/data/1")
    content = bytearray((tmp_path / "a.pt").read_bytes())
    begin = content.index(b"archive/data/0") - 30
    record = content.rindex(b"archive/data/1") - 46
    content[record + 42 : record + 46] = struct.pack("<I", begin)  # both names have one content
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(zipfile.BadZipFile, match="entries are compressed or overlap"):
        names_in_archive(tmp_path / "a.pt")


def test_a_damaged_entry_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.full((100,), 7.5)}, tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(content.replace(struct.pack("<f", 7.5), struct.pack("<f", 7.25), 1))
    names_in_archive(tmp_path / "a.pt")
    with pytest.raises(DataError, match="the checksum of a/data/0 does not match"):
        read_pickle(tmp_path / "a.pt")


def test_files_of_holes_are_refused_before_they_are_read(tmp_path: Path) -> None:
    size = 2**31
    with torch.serialization.skip_data():
        torch.save({"a": torch.empty(size, dtype=torch.uint8)}, tmp_path / "a.pt")
    for read in (read_pickle, names_in_archive):
        with pytest.raises((DataError, OSError), match="almost empty"):
            read(tmp_path / "a.pt")
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(tensor([size // 2], 0, size, "BF16")))
    os.truncate(path, path.stat().st_size + size)
    with pytest.raises(DataError, match="almost empty"):
        wav2vec2_hf.read_safetensors(path)


def test_names_that_share_one_storage_are_not_multiplied(tmp_path: Path) -> None:
    shared = torch.zeros(10_000, dtype=torch.bfloat16)
    torch.save({"a": shared, "b": shared}, tmp_path / "tied.pt")
    tied = tensors_of(read_pickle(tmp_path / "tied.pt"), tmp_path / "tied.pt")
    assert {name: value.numel() for name, value in tied.items()} == {"a": 10_000, "b": 10_000}
    torch.save({f"w{number}": shared for number in range(4)}, tmp_path / "a.pt")
    with pytest.raises(DataError, match=r"a\.pt is damaged"):
        tensors_of(read_pickle(tmp_path / "a.pt"), tmp_path / "a.pt")


def lists(levels: int) -> list[Any]:
    level: list[Any] = []
    for _ in range(levels):
        level = [level, level]
    return level


@pytest.mark.parametrize("inner", [lists(40), OrderedDict(a=({"b": lists(40)},))])
@pytest.mark.timeout(60)
def test_a_state_of_doubled_lists_is_refused(tmp_path: Path, inner: object) -> None:
    torch.save({"data": inner}, tmp_path / "state.pt", pickle_protocol=2)
    with pytest.raises(RunError, match="refer to each other too often"):
        read_state(tmp_path)


@pytest.mark.timeout(60)
def test_a_state_that_contains_itself_is_refused(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    torch.save({"data": endless}, tmp_path / "state.pt", pickle_protocol=2)
    with pytest.raises(RunError, match="refer to each other too often"):
        read_state(tmp_path)


LAYER = "encoder.layers.0.self_attn.in_proj_weight"
POSITION, CONVOLUTION = "encoder.pos_conv.0.weight_v", "feature_extractor.conv_layers.0.0.weight"
TENSORS = {
    **{f"{LAYER} of {shape}": (LAYER, shape) for shape in ((), (8,))},
    **{f"{POSITION} of {shape}": (POSITION, shape) for shape in ((), (2, 2))},
    **{f"{CONVOLUTION} of {shape}": (CONVOLUTION, shape) for shape in ((), (8,))},
    "mask_emb of ()": ("mask_emb", ()),
    "in_proj_bias of ()": (LAYER.replace("weight", "bias"), ()),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_of_other_dimensions_is_named(tmp_path: Path, case: str) -> None:
    name, shape = TENSORS[case]
    model = {"mask_emb": torch.zeros(8), name: torch.zeros(shape)}
    torch.save({"model": model, "cfg": {"model": {}}}, tmp_path / "a.pt")
    with pytest.raises(DataError, match=f"the tensor {re.escape(name)} has {len(shape)} dimensions, not "):
        wav2vec2_fairseq.read(tmp_path / "a.pt")


def test_an_attention_of_one_row_is_named(tmp_path: Path) -> None:
    settings = {"conv_feature_layers": CONV, "conv_pos_groups": 1, "encoder_attention_heads": 1}
    model = {name: torch.zeros(8) for name in ("mask_emb", "layer_norm.weight", "layer_norm.bias")}
    torch.save({"model": {**model, LAYER: torch.zeros(1, 8)}, "cfg": {"model": settings}}, tmp_path / "a.pt")
    with pytest.raises(DataError, match=r"a\.pt: the tensor "):
        wav2vec2_fairseq.read(tmp_path / "a.pt")
