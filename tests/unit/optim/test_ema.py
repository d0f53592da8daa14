"""The average of the weights: its formula, what it leaves alone, and a bit-equal resume."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from speechtrain.errors import RunError
from speechtrain.optim.ema import EMA, Average, NoEMA


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 2)
        self.coarse = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("constant", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)) + self.coarse


def network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network()


def disturb(module: nn.Module, step: int) -> None:
    """One update: weights, running statistics and counter all move."""
    generator = torch.Generator().manual_seed(step)
    module.train()
    module(torch.randn(5, 3, generator=generator))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=20), st.sampled_from([0.5, 0.99, 0.9999]))
def test_the_average_follows_its_formula(values: list[float], decay: float) -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 2.0)
    average = EMA(module, decay)
    expected = 2.0
    for n, value in enumerate(values):
        nn.init.constant_(module.weight, value)
        average.update(module)
        d = min(decay, (1 + n) / (10 + n))
        expected = d * expected + (1 - d) * float(torch.tensor(value))
    assert float(average.averaged_state_dict(module)["weight"]) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_ema_copies_counters_and_averages_statistics() -> None:
    module = network()
    average = EMA(module, 0.5)
    before = copied(module)
    disturb(module, 1)
    average.update(module)
    averaged = average.averaged_state_dict(module)
    assert averaged.keys() == module.state_dict().keys()
    assert averaged["norm.num_batches_tracked"] == 1
    assert averaged["norm.num_batches_tracked"].dtype == torch.int64
    for name in ("norm.running_mean", "norm.running_var", "linear.weight"):
        torch.testing.assert_close(averaged[name], 0.1 * before[name] + 0.9 * module.state_dict()[name])
    assert averaged["coarse"].dtype == torch.bfloat16  # as the module holds it
    assert average.state_dict()["average"]["coarse"].dtype == torch.float32  # but averaged in fp32


def test_small_steps_are_not_lost_in_half_precision() -> None:
    module = network()
    average = EMA(module, 0.999)
    average.updates = 10_000  # The warm-up is over.
    with torch.no_grad():
        module.coarse.fill_(1.0)
    for _ in range(500):
        average.update(module)
    assert average.state_dict()["average"]["coarse"].tolist() == pytest.approx([1 - 0.999**500] * 2, rel=1e-4)


def test_swapped_in_and_back_to_the_bit() -> None:
    module = network()
    average = EMA(module, 0.9)
    for step in range(4):
        disturb(module, step)
        average.update(module)
    own = copied(module)
    storage = module.linear.weight.data_ptr()
    averaged = {name: value.clone() for name, value in average.averaged_state_dict(module).items()}
    assert not same(averaged, own)
    with average.use_average(module):
        assert same(copied(module), averaged)
        assert module.linear.weight.data_ptr() == storage
    assert same(copied(module), own)

    def failing_evaluation() -> None:
        with average.use_average(module):
            disturb(module, 9)  # it may do what it likes
            raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        failing_evaluation()
    assert same(copied(module), own)
    assert same(average.averaged_state_dict(module), averaged)


def test_loading_copies() -> None:
    module = network()
    average = EMA(module, 0.9)
    state = {"updates": 3, "average": {k: v.clone() for k, v in average.state_dict()["average"].items()}}
    average.load_state_dict(state)
    state["average"]["linear.weight"].fill_(7)
    assert same(average.averaged_state_dict(module), copied(module))


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_an_average_of_another_model_is_refused(change: str) -> None:
    average = EMA(network(), 0.9)
    saved = dict(average.state_dict()["average"])
    if change == "unknown":
        saved["linear.scale"] = torch.ones(1)
    else:
        old = saved.pop("linear.weight")
        if change == "shape":
            saved["linear.weight"] = old[:1]
    with pytest.raises(RunError, match=r"does not fit the model at 'linear\.(weight|scale)'") as error:
        average.load_state_dict({"updates": 1, "average": saved})
    assert "\n" not in str(error.value)
    assert average.updates == 0


def test_no_average_is_the_weights_themselves() -> None:
    module = network()
    average: Average = NoEMA()
    own = copied(module)
    average.update(module)
    with average.use_average(module):
        assert same(copied(module), own)
    assert same(average.averaged_state_dict(module), own)
    average.load_state_dict(average.state_dict())
    assert average.state_dict() == {}
