"""A state reads back as it was, and its file has neither a pickle nor a tensor that is stored elsewhere."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from speechtrain.checkpoint import state_file
from speechtrain.checkpoint.checkpointer import Checkpointer
from speechtrain.checkpoint.state_file import read_state, write_state, write_tensors
from speechtrain.errors import ConfigError
from tests.support.checkpoints import restore


def read_back(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    write_state(path, state)
    return read_state(path)


def test_plain_values_come_back_with_their_types(tmp_path: Path) -> None:
    state = {
        "none": None,
        "flags": [True, False],
        "numbers": [0, -(2**62), 10**30, 0.1, 1.0, -0.0, 5e-324],
        "texts": ["", "$tensor", "a\n\u2028\u00fc\u5b57", "an undecodable byte: \udcff"],
        "nested": {"tuple": (1, (2.5, "x"), [()]), "empty": {}, "list": []},
        "by number": {0: "a", -3: {"1": (1,)}, True: "b"},
        "by anything": {("id", 2): 1, None: 2, 1.5: 3, "1.5": 4},
        "like a reference": {"$tensor": "a", "$tuple": [1]},
    }
    found = read_back(tmp_path / "a", state)
    assert repr(found) == repr(state)  # repr tells 1 from 1.0 and True, and a tuple from a list.


def test_infinities_and_nan_are_texts_of_valid_json(tmp_path: Path) -> None:
    found = read_back(tmp_path / "a", {"loss": [math.inf, -math.inf, math.nan]})
    assert found["loss"][:2] == [math.inf, -math.inf]
    assert math.isnan(found["loss"][2])
    with safe_open(tmp_path / "a", "pt") as file:
        values = json.loads(file.metadata()["values"], parse_constant=pytest.fail)
    assert values == {"loss": [{"$float": "inf"}, {"$float": "-inf"}, {"$float": "nan"}]}


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_each_dtype_and_shape_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    numbers = torch.arange(24).remainder(2)
    tensors = [
        numbers.to(dtype),
        numbers[1].to(dtype),  # of no dimension
        numbers.to(dtype)[:0].view(0, 3),
        numbers.to(dtype).view(4, 6).t(),  # not contiguous
        numbers.to(dtype)[:1].expand(5),
    ]
    found = read_back(tmp_path / "a", {"tensors": tensors})["tensors"]
    for tensor, expected in zip(found, tensors, strict=True):
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert torch.equal(tensor, expected)


def test_tensors_are_stored_by_their_paths(tmp_path: Path) -> None:
    state = {"optimizer": {"state": {3: {"exp_avg": torch.ones(1)}}}, "list": [torch.zeros(1)]}
    write_state(tmp_path / "a", state)
    assert sorted(load_file(tmp_path / "a")) == ["list/0", "optimizer/state/3/exp_avg"]


def test_keys_of_the_same_text_are_different_tensors(tmp_path: Path) -> None:
    state = {1: torch.ones(1), "1": torch.zeros(1), "a": {"b": torch.ones(2)}, "a/b": torch.zeros(2)}
    found = read_back(tmp_path / "a", state)
    assert found.keys() == state.keys()
    assert torch.equal(found["1"], state["1"])
    assert torch.equal(found[1], state[1])
    assert torch.equal(found["a"]["b"], state["a"]["b"])
    assert torch.equal(found["a/b"], state["a/b"])


def test_tensors_with_a_common_storage_are_copied(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    state = {"whole": whole, "again": whole, "part": whole[2:4], "overlap": whole[3:]}
    found = read_back(tmp_path / "a", state)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 4


def test_read_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    """Otherwise the disk space of a removed checkpoint would not be free until the run ends."""
    found = read_back(tmp_path / "a", {"x": torch.ones(5000)})
    with (tmp_path / "a").open("r+b") as file:
        file.truncate(0)
    assert found["x"].sum() == 5000


def test_a_value_that_no_checkpoint_stores_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no checkpoint can store data/1/drawn, a set\. Let state_dict return"
    ):
        write_state(tmp_path / "a", {"data": [{}, {"drawn": {1, 2}}]})


def write_values(path: Path, text: str, tensors: dict[str, Tensor] | None = None) -> None:
    save_file(tensors or {}, path, {"values": text})


REFUSED = {
    "a tensor that is missing": '{"a": {"$tensor": "y"}}',
    "a tensor that is used twice": '{"a": {"$tensor": "x"}, "b": {"$tensor": "x"}}',
    "a number that is no number": '{"a": {"$float": "x"}}',
    "a dtype that is none": '{"a": {"$sharded": [[1], "save"]}}',
    "a negative shape": '{"a": {"$sharded": [[-1], "float32"]}}',
    "a key that has no hash": '{"a": {"$items": [[[], 1]]}}',
    "deep nesting": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "a long number": '{"a": ' + "9" * 5_000 + "}",
    "no JSON": "{",
    "no mapping": "[1]",
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_malformed_values_are_refused(tmp_path: Path, text: str) -> None:
    write_values(tmp_path / "a", text, {"x": torch.ones(1)})
    with pytest.raises((ValueError, KeyError, TypeError, RuntimeError, RecursionError)):
        read_state(tmp_path / "a")


def test_long_values_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(tmp_path / "a", {"ids": ["x"] * 100})
    monkeypatch.setattr(state_file, "_MAX_CHARACTERS", 100)
    with pytest.raises(ValueError, match="its values have 509 characters, the most are 100"):
        read_state(tmp_path / "a")


def test_neither_a_link_nor_a_file_of_holes_is_read(tmp_path: Path) -> None:
    write_state(tmp_path / "a", {})
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(OSError, match="it is a link"):
        read_state(tmp_path / "link")
    with (tmp_path / "a").open("r+b") as file:
        file.truncate(2**31)
    with pytest.raises(OSError, match="it is almost empty"):
        read_state(tmp_path / "a")


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5)
        self.output.weight = self.embedding.weight

    def forward(self, labels: Tensor) -> Tensor:
        scores: Tensor = self.output(self.embedding(labels))
        return scores


def updated(net: Tied, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        net(torch.arange(5)).square().sum().backward()
        optimizer.step()


def test_a_tied_model_continues_bit_equally_and_stays_tied(tmp_path: Path) -> None:
    net = Tied()
    optimizer = torch.optim.AdamW(net.parameters())
    updated(net, optimizer, 3)
    Checkpointer(tmp_path).save(3, {"task": net, "optimizer": optimizer}, net.state_dict())
    updated(net, optimizer, 3)

    again = Tied()
    loaded = torch.optim.AdamW(again.parameters())
    assert restore(Checkpointer(tmp_path), {"task": again, "optimizer": loaded}) == 3
    assert again.output.weight is again.embedding.weight
    updated(again, loaded, 3)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in net.state_dict().items())
    _, weights = Checkpointer(tmp_path).weights()
    assert weights["output.weight"].equal(weights["embedding.weight"])


def test_tensors_are_written_for_readers_of_the_users_group(tmp_path: Path) -> None:
    (tmp_path / "new").touch()
    write_tensors(tmp_path / "a", {"x": torch.ones(1)})
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "new").stat().st_mode
