"""An update that the host decides and one that the graph selects are the same; warm-ups leave nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from speechtrain.optim.adamw import AdamW
from speechtrain.optim.ema import EMA
from speechtrain.optim.lamb import LAMB
from speechtrain.optim.optimizer_step import (
    BranchFreeUpdate,
    HostCheckedUpdate,
    Trained,
    Update,
    UpdateResult,
)
from speechtrain.precision import FP32
from speechtrain.training.graph_warmup import without_side_effects
from tools.rehearsal.operations import Operations
from tools.rehearsal.recorder import Recorder

OPTIMIZERS = {"adamw": lambda p: AdamW(p, fused=False, foreach=False), "lamb": LAMB}


class Run:
    """A module, its optimizer and its average under one kind of update."""

    def __init__(self, kind: type[Update], optimizer: str = "adamw", clip: float = 1.0) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.optimizer = OPTIMIZERS[optimizer](self.module.parameters())
        self.average = EMA(self.module, 0.9)
        self.update = kind(FP32(), clip)

    def step(self, seed: int, poison: bool = False, healthy: bool = True) -> float:
        generator = torch.Generator().manual_seed(seed)
        self.module(torch.randn(8, 4, generator=generator)).square().sum().backward()
        if poison:
            next(self.module.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
        scale, fine = torch.tensor(0.125), torch.tensor(float(healthy))
        return float(self.update(Trained(self.module, self.optimizer, self.average), 0.01, scale, fine))

    def state(self) -> list[Tensor]:
        kept = [
            v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()
        ]
        averages = self.average.averaged_state_dict(self.module).values()
        return [t.detach().clone() for t in (*self.module.parameters(), *kept, *averages)]


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_both_kinds_update_alike(optimizer: str, clip: float) -> None:
    decided, selected = Run(HostCheckedUpdate, optimizer, clip), Run(BranchFreeUpdate, optimizer, clip)
    for seed in range(5):
        assert selected.step(seed) == pytest.approx(decided.step(seed), rel=1e-6)
    for ours, theirs in zip(selected.state(), decided.state(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert selected.update.results(False) == []
    assert selected.update.results(True) == decided.update.results(False) == [UpdateResult.APPLIED] * 5


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("cause", [{"poison": True}, {"healthy": False}])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_not_finite_is_undone(optimizer: str, cause: dict[str, bool], first: bool) -> None:
    run = Run(BranchFreeUpdate, optimizer)
    if not first:
        run.step(0)
    run.module.eval()  # BatchNorm's statistics are forward's
    before = [p.detach().clone() for p in run.module.parameters()]
    state = [] if first else run.state()
    run.step(1, **cause)
    assert run.update.results(True)[-1] is UpdateResult.NOT_FINITE
    for ours, theirs in zip(run.module.parameters(), before, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(run.state(), state, strict=False):
        assert torch.equal(ours, theirs)
    run.step(2)
    assert run.update.results(True) == [UpdateResult.APPLIED]
    assert not torch.equal(next(run.module.parameters()), before[0])
    assert all(tensor.isfinite().all() for tensor in run.state())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_warm_up_leaves_a_run_as_it_was(optimizer: str) -> None:
    warm, plain = Run(BranchFreeUpdate, optimizer), Run(BranchFreeUpdate, optimizer)
    for begun in range(2):  # a new run, and one that goes on
        with without_side_effects(Trained(warm.module, warm.optimizer, warm.average)):
            for seed in range(7, 10):
                warm.step(seed, healthy=False)
        for seed in range(2):
            warm.step(10 * begun + seed)
            plain.step(10 * begun + seed)
        for ours, theirs in zip(warm.state(), plain.state(), strict=True):
            assert torch.equal(ours, theirs)
        assert warm.average.updates == plain.average.updates


@pytest.mark.parametrize(("kind", "reads"), [(HostCheckedUpdate, 1), (BranchFreeUpdate, 0)])
def test_an_update_is_read_once_at_most(kind: type[Update], reads: int) -> None:
    """A device waits for every read; that of the norm, for a log line, is not the update's."""
    run, recorder = Run(kind, "lamb"), Recorder(Operations())
    for seed in range(3):
        run.module(torch.randn(8, 4)).square().sum().backward()
        trained = Trained(run.module, run.optimizer, run.average)
        scale, fine = torch.tensor(0.125), torch.tensor(1.0)
        with recorder:
            run.update(trained, 0.01, scale, fine)
        assert recorder.costs.reads == reads * (seed + 1)


def test_branch_free_update_has_few_launches_by_parameter() -> None:
    """AdamW, the average, and the selection between the update and the old state."""
    run, recorder = Run(BranchFreeUpdate), Recorder(Operations())
    for seed in range(2):
        run.step(seed)
    loss = run.module(torch.randn(8, 4)).square().sum()
    loss.backward()
    trained = Trained(run.module, run.optimizer, run.average)
    with recorder:
        run.update(trained, 0.01, torch.tensor(0.125), torch.tensor(1.0))
    parameters = list(run.module.parameters())
    assert recorder.costs.launches <= 34 * len(parameters)
