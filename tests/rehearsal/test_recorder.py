"""The recorder finds what is planted in a step, and names the line; a clean step passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speechtrain.batch import Batch
from speechtrain.devices.cuda import CUDA
from tools.rehearsal.operations import GAUDI, Operations
from tools.rehearsal.recorder import RecordedDevice, Recorder, Unfit

pytestmark = pytest.mark.nightly

HERE = Path(__file__)
DEVICE = torch.device("cpu")  # The text "cpu" would be the host.


class Network(nn.Module):
    """Two layers with something planted between them."""

    def __init__(self, planted: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.planted = planted

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.second(self.planted(torch.relu(self.first(x)), number)).square().sum()


def steps(network: nn.Module, warm: int = 1, then: int = 3) -> None:
    recorder = Recorder()
    for number in range(warm + then):
        with recorder.warm_up() if number < warm else recorder:
            network(torch.ones(5, 6, device=DEVICE), number).backward()
        network.zero_grad()  # an accumulated gradient is another graph


def line_of(function: Callable[..., Any], text: str) -> int:
    """Where ``text`` stands in a function of this file."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [number for number, line in enumerate(lines, first) if text in line]
    return found


def fault(planted: Callable[[Tensor, int], Tensor]) -> Unfit:
    with pytest.raises(Unfit) as raised:
        steps(Network(planted))
    assert "\n" not in str(raised.value)
    return raised.value


def clean(x: Tensor, number: int) -> Tensor:
    index = torch.arange(x.shape[0])
    kept = x[index].masked_fill(x < 0.1, 0.0)
    seed = int(torch.randint(2**62, ()))  # of the host's own generator
    assert seed >= 0
    return torch.dropout(kept, 0.5, True) * torch.where(x > 0, x, 0.0).softmax(-1)


def item(x: Tensor, number: int) -> Tensor:
    scale = x.detach().max().item()  # planted
    return x * scale


def listed(x: Tensor, number: int) -> Tensor:
    return x * len(x.detach().tolist())  # planted


def mask(x: Tensor, number: int) -> Tensor:
    return x[x[:, 0] >= 0]  # planted


def unique(x: Tensor, number: int) -> Tensor:
    return x * torch.unique(x.detach()).shape[0]  # planted


def ragged(x: Tensor, number: int) -> Tensor:
    return x[: 5 - number]  # planted


def numbered(x: Tensor, number: int) -> Tensor:
    return x.masked_fill(x < 0.1, 0.01 * number)  # planted


def test_a_clean_step_passes() -> None:
    steps(Network(clean))


READS, DYNAMIC, NEW = "reads a value back", "depends on data", "new shape 4×8"
GRAPH = "makes a new graph"


@pytest.mark.parametrize(
    ("planted", "says"),
    [
        *((item, READS), (listed, READS), (mask, DYNAMIC), (unique, DYNAMIC)),
        *((ragged, NEW), (numbered, GRAPH)),
    ],
)
def test_what_is_planted_in_the_forward_is_named(planted: Callable[..., Tensor], says: str) -> None:
    found = fault(planted)
    assert found.source.file == str(HERE)
    assert found.source.line == line_of(planted, "# planted")
    assert says in str(found)
    assert f"{HERE.name}:{found.source.line}" in str(found)


class Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        largest = gradients[0].max().item()  # planted
        return gradients[0] * (1.0 if largest > -1 else 2.0)


def custom(x: Tensor, number: int) -> Tensor:
    return Reading.apply(x)  # made


def test_what_is_planted_in_a_backward_is_named_with_the_forward_that_made_it() -> None:
    found = fault(custom)
    assert found.source.line == line_of(Reading.backward, "# planted")
    assert found.forward is not None
    assert found.forward.line == line_of(Reading.forward, "x * 1.0")
    assert "in the backward of" in str(found)


class Listing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * len(gradients[0].tolist())  # planted


def test_memory_that_a_backward_reads_is_named() -> None:
    methods = {name: getattr(Tensor, name) for name in ("tolist", "numpy", "cpu")}
    found = fault(lambda x, number: Listing.apply(x))
    assert found.source.line == line_of(Listing.backward, "# planted")
    assert "Tensor.tolist reads a value back" in str(found)
    assert methods == {name: getattr(Tensor, name) for name in methods}


def test_a_graph_that_is_too_large_is_named() -> None:
    recorder = Recorder(Operations(largest_graph=10))

    def added(times: int) -> None:
        x = torch.ones(3, device=DEVICE)
        for _ in range(times):
            x = x + 1.0

    with recorder:
        for _ in range(3):
            added(9)
            recorder.mark_step()
        with pytest.raises(Unfit, match=r"add\.Tensor makes a graph of more than 10 operations"):
            added(10)


def test_an_operation_of_the_backward_is_put_down_to_its_line_of_the_forward() -> None:
    recorder = Recorder()
    weight = torch.ones(5, 8, requires_grad=True)

    def forward() -> Tensor:
        doubled = weight * 2.0
        return doubled.tanh()  # made

    with recorder.warm_up():
        hidden = forward()
        torch.autograd.grad(hidden.sum(), hidden)  # The warm-up has no backward of tanh.
    with recorder:
        loss = forward().sum()
        with pytest.raises(Unfit, match="of the backward") as raised:
            torch.autograd.grad(loss, weight)
    assert raised.value.source.line == line_of(forward, "# made")


def test_the_warm_up_refuses_what_no_step_may_do() -> None:
    recorder = Recorder()
    with pytest.raises(Unfit), recorder.warm_up():
        torch.ones(3, device=DEVICE).sum().item()
    float(torch.ones(3, device=DEVICE).sum())  # nobody watches any more


# --- the table of a device ------------------------------------------------------------------------------


def refused(operation: Callable[[Tensor], object]) -> Unfit:
    given = torch.arange(6, dtype=torch.int64).view(2, 3)
    with pytest.raises(Unfit) as raised, Recorder(GAUDI):
        operation(given)
    return raised.value


@pytest.mark.parametrize(
    ("operation", "says"),
    [
        (lambda x: x * 0x2545F * 4096, "has the value 3126702080, but int64 has 32 bits"),
        (lambda x: torch.tensor([2**40]).to(DEVICE), "the copy to the device has the value 1099511627776"),
        (lambda x: x.float().view(torch.int32), "view.dtype reinterprets bits"),
        (lambda x: x.double(), "is of torch.float64"),
        (lambda x: x.float() * 1j, "is of torch.complex64"),
        (lambda x: torch.fft.rfft(x.float()), "not in the device's table"),
        (lambda x: x + torch.tensor([1, 2, 3]), "combines a tensor on the host"),
        (lambda x: x + torch.from_numpy(np.ones(3)), "combines a tensor on the host"),
        (lambda x: x.expand(2, 3).repeat(1, 13).sort(stable=True), "sort.stable runs on the CPU"),
        (lambda x: F.embedding(x, x.new_ones(6, 2) > 0), "runs on the CPU, because it is of torch.bool"),
        (lambda x: F.embedding(x, x.new_ones(6, 2), sparse=True), "scale_grad_by_freq or sparse is set"),
        (lambda x: torch.where((x > 2).to(torch.uint8), x, 0), "the condition is of torch.uint8"),
    ],
)
def test_what_gaudi_refuses_is_named_with_its_line(operation: Callable[..., Any], says: str) -> None:
    found = refused(operation)
    assert says in str(found)
    assert found.source.file == str(HERE)
    assert found.source.line == operation.__code__.co_firstlineno


def test_the_copy_of_a_batch_names_the_field() -> None:
    one = torch.ones(1, dtype=torch.int64)
    batch = Batch(torch.zeros(1, 8), one, one[None], one, torch.ones(1), one * 2**62, ("a",), ("a",))
    with pytest.raises(Unfit, match=r"Batch\.keys has the value 4611686018427387904"):
        Recorder(GAUDI).move(batch)


def test_costs_are_counted() -> None:
    recorder = Recorder(Operations())
    given = torch.ones(256, 4)
    with recorder:
        total = (given.t() * 2.0).sum()  # a view, then 4 + 4 KiB, then 4 KiB and a number
        assert float(total) == 2048.0
        given[given[:, 0] > 0]
    assert recorder.costs.reads == 2
    assert recorder.costs.moved > 3 * 4096
    assert recorder.costs.launches == 4  # mul, sum, gt, index
    assert 2 * 4096 <= recorder.costs.peak < 3 * 4096


def test_memory_that_is_freed_does_not_count_at_the_peak() -> None:
    recorder = Recorder(Operations())
    with recorder:
        for _ in range(10):
            torch.ones(1024, device=DEVICE) * 2.0
    assert recorder.costs.peak < 4 * 4096


def test_segments_are_distinct_by_operations_shapes_constants_and_wiring() -> None:
    recorder = Recorder(Operations())

    def segment(operation: Callable[[Tensor, Tensor], Tensor], size: int = 3) -> int:
        given = torch.ones(2, size).unbind()
        with recorder:
            operation(given[0].clone(), given[1].clone())
            recorder.mark_step()
        return recorder.distinct

    assert segment(lambda a, b: a * b + a) == 1
    assert segment(lambda a, b: a * b + a) == 1
    assert segment(lambda a, b: a * b + b) == 2
    assert segment(lambda a, b: a * b + a, size=4) == 3
    assert segment(lambda a, b: a * 2.0) == 4
    assert segment(lambda a, b: a * 3.0) == 5
    assert recorder.segments == [4, 4, 4, 4, 3, 3]


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.sort(dim=1, stable=True),
        lambda x: x.repeat(20, 20).sort(dim=1),
        lambda x: torch.isfinite(x.float()),
        lambda x: F.embedding(x, torch.ones(6, 2, device=x.device)),
        lambda x: torch.where(x > 2, x, 0),
        lambda x: (x > 2).cumsum(1),
        lambda x: torch.cdist(x.float(), x.float()),
    ],
)
def test_what_gaudi_runs_is_allowed(operation: Callable[[Tensor], object]) -> None:
    tensor = torch.arange(6, dtype=torch.int64).view(2, 3)
    with Recorder(GAUDI):
        operation(tensor)


# --- reads and copies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.tensor([1.0], device=x.device),
        lambda x: torch.as_tensor([1.0], device=x.device),
        lambda x: torch.as_tensor(torch.ones(2), device=x.device),
        lambda x: x.new_tensor([1.0]),
        lambda x: torch.rand(3).to(x.device),
        lambda x: x.copy_(torch.ones(2, 3)),
        lambda x: x[torch.tensor([0, 1])],
    ],
)
def test_count_copy_names_a_copy_outside_of_crossings(operation: Callable[[Tensor], Tensor]) -> None:
    tensor = torch.zeros(2, 3)
    recorder = Recorder(Operations())
    with recorder:
        operation(tensor)
    assert (recorder.costs.copies, recorder.costs.reads) == (1, 0)
    with pytest.raises(Unfit, match="copies from the host") as raised, Recorder(Operations(), crossings=()):
        operation(tensor)
    assert raised.value.source.line == operation.__code__.co_firstlineno


def test_count_copy_allows_tensors_that_no_copy_makes() -> None:
    tensor = torch.zeros(2, 3)
    with Recorder(Operations(), crossings=()) as recorder:
        torch.zeros(3, device=tensor.device)
        torch.tensor([1.0, 2.0]) + torch.rand(2)
        torch.as_tensor(tensor).to(torch.float16)
        tensor.fill_(3.0).masked_fill(tensor > 0, 1.0)
        tensor.new_zeros(2)
    assert recorder.costs.copies == 0


READERS = [
    lambda x: x.sum().item(),
    lambda x: x.cpu(),
    lambda x: x.to("cpu"),
    lambda x: torch.zeros(2, 3).copy_(x),
    lambda x: float(x.cpu().sum()),
]


@pytest.mark.parametrize("reader", READERS)
def test_count_read_allows_a_crossing(reader: Callable[[Tensor], object]) -> None:
    tensor = torch.zeros(2, 3)
    function = f"{HERE}:{reader.__code__.co_qualname}"
    with Recorder(Operations(), crossings=[function]) as recorder:
        reader(tensor)
    assert recorder.costs.reads == 1
    with pytest.raises(Unfit, match="reads a value back") as raised, Recorder(Operations(), crossings=()):
        reader(tensor)
    assert raised.value.source.line == reader.__code__.co_firstlineno


def test_count_read_refuses_a_read_that_cuts_a_graph() -> None:
    tensor = torch.zeros(2, 3)
    crossings = [f"{HERE}:test_count_read_refuses_a_read_that_cuts_a_graph"]
    with Recorder(Operations(records=True), crossings) as recorder:
        tensor.cpu()
        total = tensor.sum()
        recorder.mark_step()
        total.cpu()
        tensor.sum()
        with pytest.raises(Unfit, match="reads a value back"):
            total.cpu()


def test_recorded_device_counts_a_wait() -> None:
    recorder = Recorder(Operations(), crossings=())
    device = RecordedDevice(CUDA(), recorder)
    with pytest.raises(Unfit, match=r"Device\.synchronize waits for the device") as raised, recorder:
        device.synchronize()  # waits
    assert raised.value.source.line == inspect.getsourcelines(test_recorded_device_counts_a_wait)[1] + 4


def test_allow_numbers_of_an_optimizer_only() -> None:
    recorder = Recorder()
    weight = nn.Parameter(torch.ones(()))
    weight.grad = torch.ones(())
    optimizer = torch.optim.AdamW([weight], foreach=False)
    recorder.allow_numbers(optimizer)
    for number, watch in enumerate((recorder.warm_up(), recorder.warm_up(), recorder, recorder)):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        with watch:
            optimizer.step()
    assert recorder.distinct == 2  # The first step creates the state.
    with pytest.raises(Unfit, match="makes a new graph"), recorder:
        weight.grad / 0.5
