"""TDT (labels and blanks that take several frames) against enumeration, plain autograd and transformers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from speechtrain.losses.transducer import transducer_loss
from tests.support.lattices import NAMES, Problem, earliness, joint_dropout_mask
from tools.rehearsal.operations import GAUDI
from tools.rehearsal.recorder import Recorder

FORMS = pytest.mark.parametrize("static", [False, True], ids=["ragged", "static"])
USUAL = (0, 1, 2, 3, 4)
SETS = pytest.mark.parametrize("durations", [USUAL, (1, 2), (0, 2, 5), (0, 1), (3,)], ids=str)


def drawn(frames: list[int], symbols: list[int], durations: tuple[int, ...], **options: Any) -> Problem:
    """A problem whose output layer has a row more for each duration."""
    problem = Problem.draw(frames, symbols, **options)
    generator = torch.Generator().manual_seed(99)
    encoder, prediction, weight, bias = problem.inputs
    rows = torch.randn(len(durations), weight.shape[1], generator=generator, dtype=torch.float64)
    spread = options.get("spread", 1.0) / weight.shape[1] ** 0.5
    extra = torch.randn(len(durations), generator=generator, dtype=torch.float64)
    inputs = encoder, prediction, torch.cat((weight, rows * spread)), torch.cat((bias, extra))
    return replace(problem, inputs=inputs)


def run(
    problem: Problem, durations: tuple[int, ...], dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    blank = len(problem.inputs[3]) - len(durations) - 1
    return problem.run(dtype, durations=durations, blank=blank, **options)


def logits(problem: Problem, inputs: list[Tensor], kept: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Those of the whole padded lattice (B, T, P, V + K)."""
    encoder, prediction, weight, bias = inputs
    hidden = torch.relu(encoder[:, :, None] + prediction[:, None])
    if kept is not None:
        hidden = hidden * kept * scale
    return hidden @ weight.T + bias


def split(
    problem: Problem, at: Tensor, row: int, durations: tuple[int, ...], sigma: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of one utterance: blank (T, P), label (T, U), durations (T, P, K)."""
    frames, symbols = int(problem.frames[row]), int(problem.symbols[row])
    vocabulary = at.shape[-1] - len(durations)
    mine = at[row, :frames, : symbols + 1]
    log_p = mine[..., :vocabulary].log_softmax(-1) - sigma
    target = problem.labels[row, :symbols]
    label = log_p[:, :-1].gather(-1, target.expand(frames, -1)[..., None])[..., 0]
    return log_p[..., vocabulary - 1], label, mine[..., vocabulary:].log_softmax(-1)


def plain_loss(blank: Tensor, label: Tensor, log_d: Tensor, durations: tuple[int, ...]) -> Tensor:
    """-log P, cell by cell, with autograd; 0 where there is no path."""
    frames, positions = blank.shape
    alpha: dict[tuple[int, int], list[Tensor]] = {(0, 0): [torch.zeros((), dtype=blank.dtype)]}
    for t, u in itertools.product(range(frames), range(positions)):
        if (t, u) not in alpha:
            continue
        here = torch.logsumexp(torch.stack(alpha[t, u]), 0)
        for k, d in enumerate(durations):
            if d and (t + d < frames or (t + d == frames and u == positions - 1)):
                alpha.setdefault((t + d, u), []).append(here + blank[t, u] + log_d[t, u, k])
            if u < positions - 1 and t + d < frames:
                alpha.setdefault((t + d, u + 1), []).append(here + label[t, u] + log_d[t, u, k])
    end = alpha.get((frames, positions - 1), []) if frames else []
    return -torch.logsumexp(torch.stack(end), 0) if end else blank.sum() * 0


def oracle(
    problem: Problem,
    durations: tuple[int, ...],
    sigma: float = 0.0,
    rate: float = 0.0,
    seed: int = 0,
    delay_penalty: float = 0.0,
) -> tuple[Tensor, list[Tensor]]:
    inputs, kept, scale = problem.leaves(), None, 1.0
    if rate:
        shape = (*problem.inputs[0].shape[:2], problem.inputs[1].shape[1], problem.inputs[0].shape[2])
        kept, scale = joint_dropout_mask(*shape, rate=rate, seed=seed)
    at = logits(problem, inputs, kept, scale)
    rows = range(len(problem.frames))
    losses = []
    for row in rows:
        blank, label, log_d = split(problem, at, row, durations, sigma)
        label = label + delay_penalty * earliness(len(label))
        losses.append(plain_loss(blank, label, log_d, durations))
    loss = torch.stack(losses)
    gradients = torch.autograd.grad((loss * problem.upstream).sum(), inputs, allow_unused=True)
    return loss.detach(), [
        torch.zeros_like(x) if g is None else g for g, x in zip(gradients, inputs, strict=True)
    ]


def assert_gradients(ours: tuple[Tensor, ...], true: list[Tensor], relative: float) -> None:
    """Every element, relative to the largest of its tensor."""
    for name, mine, exact in zip(NAMES, ours, true, strict=True):
        wrong = float((mine.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-300))
        assert wrong <= relative, f"gradient of {name}: {wrong:.2e} of the largest > {relative:.0e}"


def enumerated(blank: Tensor, label: Tensor, log_d: Tensor, durations: tuple[int, ...]) -> Tensor | None:
    """-log P as the sum over every single path; None if there is none."""
    frames, positions = blank.shape
    totals: list[Tensor] = []

    def follow(t: int, u: int, total: Tensor) -> None:
        if (t, u) == (frames, positions - 1):
            totals.append(total)
        if t >= frames:
            return
        for k, d in enumerate(durations):
            if d and t + d <= frames:
                follow(t + d, u, total + blank[t, u] + log_d[t, u, k])
            if u < positions - 1 and t + d < frames:  # no blank could follow at frame T
                follow(t + d, u + 1, total + label[t, u] + log_d[t, u, k])

    follow(0, 0, torch.zeros((), dtype=blank.dtype))
    return -torch.logsumexp(torch.stack(totals), 0) if totals else None


RAGGED = ([9, 1, 4, 6, 0, 1, 12, 3], [4, 2, 0, 5, 3, 0, 1, 7])


@FORMS
@SETS
@pytest.mark.parametrize(("frames", "symbols"), [(1, 0), (1, 2), (2, 1), (5, 2), (6, 0), (7, 3), (12, 1)])
def test_every_path_enumerated(static: bool, durations: tuple[int, ...], frames: int, symbols: int) -> None:
    problem = drawn([frames], [symbols], durations)
    parts = split(problem, logits(problem, list(problem.inputs)), 0, durations, sigma=0.05)
    true = enumerated(*parts, durations)
    (loss,), gradients = run(problem, durations, sigma=0.05, static=static)
    if true is None:
        assert loss == 0
        assert not any(bool(g.any()) for g in gradients)
    else:
        torch.testing.assert_close(loss, true, rtol=1e-12, atol=1e-12)


@SETS
@pytest.mark.parametrize("even", [False, True], ids=["uneven", "even"])
def test_ragged_lattices_in_float64(durations: tuple[int, ...], even: bool) -> None:
    """No labels, no frames, no path; chunks that end anywhere; all logits kept, or those of 20 cells."""
    problem = drawn(*RAGGED, durations)
    problem = problem.evenly() if even else problem
    true_loss, true = oracle(problem, durations, sigma=0.05)
    for static, chunk, keep in itertools.product((False, True), (1, 7, 1024), (20 * 12 * 8, 2**20)):
        loss, gradients = run(problem, durations, static=static, chunk=chunk, keep=keep, sigma=0.05)
        torch.testing.assert_close(loss, true_loss, rtol=1e-12, atol=1e-12)
        assert_gradients(gradients, true, 1e-12)
        assert loss[4] == 0
        assert not gradients[0][4].any()


@FORMS
@SETS
def test_delay_penalty(static: bool, durations: tuple[int, ...]) -> None:
    problem = drawn(*RAGGED, durations)
    true_loss, true = oracle(problem, durations, sigma=0.05, delay_penalty=0.3)
    loss, gradients = run(problem, durations, static=static, chunk=7, sigma=0.05, delay_penalty=0.3)
    torch.testing.assert_close(loss, true_loss, rtol=1e-12, atol=1e-12)
    assert_gradients(gradients, true, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.5, 1.0, 4.0])
def test_fp32_gradients(spread: float) -> None:
    problem = drawn([30, 21, 40], [9, 10, 14], USUAL, hidden=32, vocabulary=48, spread=spread)
    true_loss, true = oracle(problem, USUAL, sigma=0.05)
    for static in (False, True):
        loss, gradients = run(problem, USUAL, torch.float32, static=static, sigma=0.05)
        torch.testing.assert_close(loss.double(), true_loss, rtol=2e-6, atol=0)
        assert_gradients(gradients, true, 2e-6)


@FORMS
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_gradcheck(static: bool, activation: str) -> None:
    problem = drawn([4, 1], [2, 1], (0, 1, 3), hidden=3, vocabulary=3)

    def loss(*inputs: Tensor) -> Tensor:
        return transducer_loss(
            *inputs,  # type: ignore[arg-type]
            problem.labels,
            problem.frames,
            problem.symbols,
            blank=2,
            activation=activation,
            dropout=0.3,
            seed=5,
            durations=(0, 1, 3),
            sigma=0.1,
            skip_below=0.0,
            static=static,
        )

    assert torch.autograd.gradcheck(loss, problem.leaves())


@FORMS
@pytest.mark.parametrize("garbage", [float("nan"), 1e30])
def test_padding_is_never_looked_at(static: bool, garbage: float) -> None:
    problem = drawn(*RAGGED, USUAL)
    encoder, prediction, weight, bias = (x.clone() for x in problem.inputs)
    labels = problem.labels.clone()
    for row, (frames, symbols) in enumerate(zip(*RAGGED, strict=True)):
        encoder[row, frames:], prediction[row, symbols + 1 :], labels[row, symbols:] = garbage, garbage, -7
    spoilt = replace(problem, inputs=(encoder, prediction, weight, bias), labels=labels)
    ours, clean = run(spoilt, USUAL, static=static), run(problem, USUAL, static=static)
    assert torch.equal(ours[0], clean[0])
    assert all(torch.equal(a, b) for a, b in zip(ours[1], clean[1], strict=True))


@FORMS
def test_a_loss_that_is_no_number_stays_one(static: bool) -> None:
    problem = drawn([5, 4], [2, 2], USUAL)
    problem.inputs[0][1, 2] = torch.nan
    loss, gradients = run(problem, USUAL, static=static)
    assert loss.isnan().tolist() == [False, True]
    assert gradients[0][1].isnan().any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"durations": (2, 1)}, "ascending"),
        ({"durations": (1, 1)}, "ascending"),
        ({"durations": (-1, 1)}, "0 to 32"),
        ({"durations": (0,)}, "above 0"),
        ({"durations": (0, 1.5)}, "whole"),
        ({"durations": USUAL, "fastemit": 0.1}, "fastemit"),
        ({"durations": USUAL, "sigma": -0.1}, "sigma"),
        ({"sigma": 0.1}, "sigma"),
        ({"durations": (*range(12),)}, "blank is 6. It must be the id of a class"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem.draw([4], [2]).run(**options)


def test_a_label_is_no_duration() -> None:
    problem = drawn([4], [2], USUAL)
    with pytest.raises(ValueError, match="outside the vocabulary of 7"):
        run(replace(problem, labels=problem.labels + 7), USUAL)


def test_static_form_is_of_gaudis_operations() -> None:
    """Shapes and operations that its table has, and no read by the host."""
    problem = drawn([30, 22], [8, 5], USUAL)
    recorder = Recorder(GAUDI)
    moved = [recorder.copy_to_device(x.float().detach()).requires_grad_() for x in problem.inputs]
    integers = [recorder.copy_to_device(x) for x in (problem.labels, problem.frames, problem.symbols)]
    with recorder.warm_up():
        loss = transducer_loss(*moved, *integers, blank=6, durations=USUAL, sigma=0.05, static=True)
        torch.autograd.backward(loss.sum())
        recorder.mark_step()
    # a graph of 5000 is the most: about 200 frames and labels together
    assert recorder.costs.launches <= 1500
