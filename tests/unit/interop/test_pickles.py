"""Pickles of torch: what is read from an archive, and which archives are refused."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from speechtrain.errors import DataError
from speechtrain.interop.pickles import read_pickle, tensors_of


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


def test_a_damaged_entry_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.full((100,), 7.5)}, tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(content.replace(struct.pack("<f", 7.5), struct.pack("<f", 7.25), 1))
    with pytest.raises(DataError, match="the checksum of a/data/0 does not match"):
        read_pickle(tmp_path / "a.pt")


def test_names_that_share_one_storage_are_not_multiplied(tmp_path: Path) -> None:
    shared = torch.zeros(10_000, dtype=torch.bfloat16)
    torch.save({"a": shared, "b": shared}, tmp_path / "tied.pt")
    tied = tensors_of(read_pickle(tmp_path / "tied.pt"), tmp_path / "tied.pt")
    assert {name: value.numel() for name, value in tied.items()} == {"a": 10_000, "b": 10_000}
    torch.save({f"w{number}": shared for number in range(4)}, tmp_path / "a.pt")
    with pytest.raises(DataError, match=r"a\.pt is damaged"):
        tensors_of(read_pickle(tmp_path / "a.pt"), tmp_path / "a.pt")
