"""The transducer loss against enumerated alignments, a plain lattice in float64 and finite differences.

Legend: T frames, U labels and P = U + 1 positions of an utterance, V classes. The loss has two forms.
The form ``rows`` computes only the cells of each utterance. The form ``static`` computes the padded lattice.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from speechtrain.losses.transducer import transducer_loss
from speechtrain.losses.transducer_dropout import mix, mix_in_place
from speechtrain.losses.transducer_joint import arcs_with_penalty
from speechtrain.losses.transducer_ragged import RaggedJoint
from tests.support.lattices import NAMES, Problem, earliness, joint_dropout_mask, plain_settings

FORMS = pytest.mark.parametrize("static", [False, True], ids=["rows", "static"])
UPSTREAM = pytest.mark.parametrize("is_even", [False, True], ids=["uneven", "even"])
"""Whether the gradients that the losses get from above are equal for all utterances."""


def arcs(
    problem: Problem,
    inputs: list[Tensor],
    row: int,
    kept: Tensor | None,
    scale: float,
    activation: str = "relu",
) -> Tensor:
    """Compute the log-probabilities (T, P, V) of all arcs of one utterance."""
    frames, symbols = int(problem.frames[row]), int(problem.symbols[row])
    encoder, prediction, weight, bias = inputs
    hidden = encoder[row, :frames, None] + prediction[row, None, : symbols + 1]
    hidden = torch.relu(hidden) if activation == "relu" else torch.tanh(hidden)
    if kept is not None:
        hidden = hidden * kept[row, :frames, : symbols + 1] * scale
    return torch.log_softmax(hidden @ weight.T + bias, -1)


def plain_loss(blank: Tensor, label: Tensor) -> Tensor:
    """Compute the loss of one utterance cell by cell, with autograd.

    ``blank`` (T, P) and ``label`` (T, U) are the log-probabilities of the arcs.
    """
    frames, positions = blank.shape
    if frames == 0:
        return blank.sum() * 0
    alpha: dict[tuple[int, int], Tensor] = {}
    for t, u in itertools.product(range(frames), range(positions)):
        into = []
        if t > 0:
            into.append(alpha[t - 1, u] + blank[t - 1, u])
        if u > 0:
            into.append(alpha[t, u - 1] + label[t, u - 1])
        alpha[t, u] = torch.logsumexp(torch.stack(into), 0) if into else torch.zeros_like(blank[0, 0])
    return -(alpha[frames - 1, positions - 1] + blank[frames - 1, positions - 1])


def oracle(
    problem: Problem,
    rate: float = 0.0,
    seed: int = 0,
    fastemit: float = 0.0,
    activation: str = "relu",
    delay_penalty: float = 0.0,
) -> tuple[Tensor, list[Tensor]]:
    """Losses and gradients over whole lattices in float64. FastEmit is applied to the gradient of label arcs,
    between the recursion and the softmax. The delay penalty is added to the label arcs."""
    kept, scale = None, 1.0
    if rate:
        shape = (*problem.inputs[0].shape[:2], problem.inputs[1].shape[1], problem.inputs[0].shape[2])
        kept, scale = joint_dropout_mask(*shape, rate=rate, seed=seed)
    inputs = problem.leaves()
    losses, surrogate = [], torch.zeros((), dtype=torch.float64)
    for row in range(len(problem.frames)):
        log_p = arcs(problem, inputs, row, kept, scale, activation)
        target = problem.labels[row, : int(problem.symbols[row])]
        blank = log_p[..., problem.blank]
        label = log_p[:, :-1].gather(-1, target.expand(len(log_p), -1)[..., None])[..., 0]
        leaf_blank, leaf_label = blank.detach().requires_grad_(), label.detach().requires_grad_()
        loss = plain_loss(leaf_blank, leaf_label + delay_penalty * earliness(len(log_p)))
        losses.append(loss.detach())
        above = problem.upstream[row]
        of_blank, of_label = torch.autograd.grad(loss, (leaf_blank, leaf_label), allow_unused=True)
        if of_blank is not None:
            surrogate = surrogate + above * (of_blank * blank).sum()
        if of_label is not None:
            surrogate = surrogate + above * (1 + fastemit) * (of_label * label).sum()
    gradients = torch.autograd.grad(surrogate, inputs, allow_unused=True)
    return torch.stack(losses), [
        torch.zeros_like(x) if g is None else g for g, x in zip(gradients, inputs, strict=True)
    ]


def assert_gradients(ours: tuple[Tensor, ...], true: list[Tensor], relative: float) -> None:
    for name, mine, exact in zip(NAMES, ours, true, strict=True):
        wrong = float((mine.double() - exact).norm() / exact.norm().clamp(min=1e-300))
        assert wrong <= relative, f"gradient of {name}: relative error {wrong:.2e} > {relative:.0e}"


RAGGED = Problem.draw(frames=[9, 1, 4, 6, 0, 1], symbols=[4, 2, 0, 5, 3, 0])
BYTES_OF_20_CELLS = 20 * 7 * 8  # 7 classes of float64
REALISTIC = Problem.draw(frames=[60, 41], symbols=[17, 20], hidden=64, vocabulary=96)


@FORMS
@pytest.mark.parametrize("frames", [1, 2, 4])
@pytest.mark.parametrize("symbols", [0, 1, 3])
def test_every_alignment_enumerated(frames: int, symbols: int, static: bool) -> None:
    """A path begins with U labels and T - 1 blanks in any order, and its last arc is a blank."""
    problem = Problem.draw([frames], [symbols])
    log_p = arcs(problem, problem.leaves(), 0, None, 1.0).detach()
    paths = []
    for label_steps in itertools.combinations(range(frames + symbols - 1), symbols):
        t = u = 0
        total = torch.zeros((), dtype=torch.float64)
        for step in range(frames + symbols - 1):
            if step in label_steps:
                total = total + log_p[t, u, int(problem.labels[0, u])]
                u += 1
            else:
                total = total + log_p[t, u, problem.blank]
                t += 1
        paths.append(total + log_p[t, u, problem.blank])
    loss, _ = problem.run(static=static)
    torch.testing.assert_close(loss[0], -torch.logsumexp(torch.stack(paths), 0), rtol=1e-12, atol=1e-12)


@FORMS
def test_a_path_is_penalised_by_the_frames_of_its_labels(static: bool) -> None:
    """Three frames: a label gets lambda in the first, nothing in the second and -lambda in the last."""
    problem = Problem.draw([3], [1])
    log_p = arcs(problem, problem.leaves(), 0, None, 1.0).detach()
    paths = []
    for label_frame, penalty in enumerate([0.7, 0.0, -0.7]):
        before = log_p[:label_frame, 0, problem.blank].sum()
        label = log_p[label_frame, 0, int(problem.labels[0, 0])] + penalty
        after = log_p[label_frame:, 1, problem.blank].sum()
        paths.append(before + label + after)
    loss, _ = problem.run(static=static, delay_penalty=0.7)
    torch.testing.assert_close(loss[0], -torch.logsumexp(torch.stack(paths), 0), rtol=1e-12, atol=1e-12)


@FORMS
@UPSTREAM
@pytest.mark.parametrize("seed", range(10))
def test_delay_penalty_of_ragged_lattices(static: bool, is_even: bool, seed: int) -> None:
    """Lengths, chunks and lambda are random. One utterance has no frames, and one has no labels."""
    draw = Random(seed)
    frames = [0, *(draw.randint(1, 9) for _ in range(4))]
    symbols = [3, 0, *(draw.randint(1, 6) for _ in range(3))]
    problem = Problem.draw(frames, symbols, spread=draw.choice([0.5, 1.0, 4.0]), seed=seed)
    problem = problem.evenly() if is_even else problem
    fastemit, delay_penalty = draw.choice([0.0, 0.1]), draw.choice([0.003, 0.1, 2.0])
    true_loss, true = oracle(problem, 0.25, seed, fastemit, delay_penalty=delay_penalty)
    options = {"dropout": 0.25, "seed": seed, "fastemit": fastemit, "delay_penalty": delay_penalty}
    options |= {"chunk": draw.choice([1, 7, 1024]), "keep": draw.choice([0, BYTES_OF_20_CELLS, 2**20])}
    loss, gradients = problem.run(static=static, **options)
    torch.testing.assert_close(loss, true_loss, rtol=1e-11, atol=1e-11)
    assert_gradients(gradients, true, 1e-11)
    assert loss[0] == 0
    assert not gradients[0][0].any()


@FORMS
@pytest.mark.parametrize("delay_penalty", [0.01, 0.3])
def test_delay_penalty_in_fp32(static: bool, delay_penalty: float) -> None:
    true_loss, true = oracle(REALISTIC, delay_penalty=delay_penalty)
    loss, gradients = REALISTIC.run(torch.float32, static=static, delay_penalty=delay_penalty)
    torch.testing.assert_close(loss.double(), true_loss, rtol=2e-6, atol=1e-5)
    assert_gradients(gradients, true, 3e-6)


def test_without_delay_penalty_the_arcs_are_the_same_tensors() -> None:
    arcs_of_batch = [torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)]
    assert arcs_with_penalty(plain_settings(), arcs_of_batch, torch.tensor([2])) is arcs_of_batch


@FORMS
@pytest.mark.parametrize("chunk", [1, 7, 1024])
@pytest.mark.parametrize("keep", [0, BYTES_OF_20_CELLS, 2**20])
@UPSTREAM
def test_ragged_lattices_in_float64(static: bool, chunk: int, keep: int, is_even: bool) -> None:
    """RAGGED has rows without labels, with one frame and without frames.

    The chunks end anywhere. The logits of no cell, of 20 cells or of all cells are kept for the gradient.
    """
    problem = RAGGED.evenly() if is_even else RAGGED
    loss, gradients = problem.run(static=static, chunk=chunk, keep=keep)
    true_loss, true = oracle(problem)
    torch.testing.assert_close(loss, true_loss, rtol=1e-12, atol=1e-12)
    assert_gradients(gradients, true, 1e-12)
    assert loss[4] == 0
    assert not gradients[0][4].any()
    assert not gradients[1][4].any()


@FORMS
@pytest.mark.parametrize("rate", [0.0, 0.3])
@UPSTREAM
def test_a_joint_of_tanh_in_float64(static: bool, rate: float, is_even: bool) -> None:
    problem = RAGGED.evenly() if is_even else RAGGED
    loss, gradients = problem.run(static=static, activation="tanh", dropout=rate, seed=5)
    true_loss, true = oracle(problem, rate, seed=5, activation="tanh")
    torch.testing.assert_close(loss, true_loss, rtol=1e-12, atol=1e-12)
    assert_gradients(gradients, true, 1e-12)
    # With inputs of 0, all units are tanh(0) = 0, as if dropped. The kept units must still have a gradient.
    encoder, prediction, weight, bias = problem.inputs
    zero = replace(problem, inputs=(0 * encoder, 0 * prediction, weight, bias))
    _, gradients = zero.run(static=static, activation="tanh", dropout=rate, seed=5)
    assert_gradients(gradients, oracle(zero, rate, seed=5, activation="tanh")[1], 1e-12)
    loss, gradients = REALISTIC.run(torch.float32, static=static, activation="tanh")
    true_loss, true = oracle(REALISTIC, activation="tanh")
    torch.testing.assert_close(loss.double(), true_loss, rtol=1e-5, atol=1e-5)
    assert_gradients(gradients, true, 1e-5)


@FORMS
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_padding_is_never_looked_at(static: bool, garbage: float) -> None:
    encoder, prediction, weight, bias = (x.clone() for x in RAGGED.inputs)
    labels = RAGGED.labels.clone()
    for row, (frames, symbols) in enumerate(zip(RAGGED.frames, RAGGED.symbols, strict=True)):
        encoder[row, frames:] = garbage
        prediction[row, symbols + 1 :] = garbage
        labels[row, symbols:] = -7
    spoilt = replace(RAGGED, inputs=(encoder, prediction, weight, bias), labels=labels)
    loss, gradients = spoilt.run(static=static)
    expected_loss, expected = RAGGED.run(static=static)
    assert torch.equal(loss, expected_loss)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert torch.equal(ours, theirs)


@FORMS
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_layout_of_the_inputs_is_free(static: bool, order: tuple[int, int, int]) -> None:
    """Time first, as LSTMs like it, or any other strides."""
    encoder, prediction, weight, bias = RAGGED.inputs
    back = [order.index(axis) for axis in range(3)]
    strided = [x.permute(order).contiguous().permute(back) for x in (encoder, prediction)]
    assert not strided[0].is_contiguous()
    leaves = [x.detach().requires_grad_() for x in (*strided, weight.t().contiguous().t(), bias)]
    lengths = RAGGED.frames, RAGGED.symbols
    options: dict[str, Any] = {"compute_dtype": torch.float64, "skip_below": 0.0, "static": static}
    loss = transducer_loss(*leaves, RAGGED.labels, *lengths, blank=RAGGED.blank, **options)  # type: ignore[misc]
    gradients = torch.autograd.grad((loss * RAGGED.upstream).sum(), leaves)
    assert_gradients(gradients, list(RAGGED.run(static=static)[1]), 1e-14)


@FORMS
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_gradcheck(static: bool, activation: str, rate: float) -> None:
    """Finite differences, with the dropout mask held by its seed."""
    problem = Problem.draw([3, 1], [1, 1], hidden=3, vocabulary=3)

    def loss(*inputs: Tensor) -> Tensor:
        return transducer_loss(
            *inputs,  # type: ignore[arg-type]
            problem.labels,
            problem.frames,
            problem.symbols,
            blank=problem.blank,
            activation=activation,
            dropout=rate,
            seed=5,
            skip_below=0.0,
            static=static,
        )

    assert torch.autograd.gradcheck(loss, problem.leaves())


@pytest.mark.parametrize(("skip_below", "relative"), [(0.0, 1e-6), (1e-6, 3e-6)])
@pytest.mark.parametrize("spread", [0.5, 1.0, 4.0])
@UPSTREAM
def test_fp32_gradients(skip_below: float, relative: float, spread: float, is_even: bool) -> None:
    weight = REALISTIC.inputs[2] * spread
    problem = replace(REALISTIC, inputs=(*REALISTIC.inputs[:2], weight, REALISTIC.inputs[3]))
    problem = problem.evenly() if is_even else problem
    loss, gradients = problem.run(torch.float32, skip_below=skip_below)
    true_loss, true = oracle(problem)
    torch.testing.assert_close(loss.double(), true_loss, rtol=1e-6, atol=0)
    assert_gradients(gradients, true, relative)


@dataclass
class Work:
    """Cells that one loss with its gradient computes."""

    forward: int = 0
    from_kept: int = 0
    anew: int = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Count the cells that the form ``rows`` computes."""
    work = Work()
    joint_class = RaggedJoint
    fill_cells, add_cells = joint_class._fill_cells, joint_class._add_cell_gradients

    def counted_fill(self: Any, cells: Any, logits: Tensor) -> None:
        work.forward += len(logits)
        fill_cells(self, cells, logits)

    def counted_add(self: Any, cells: Any, *fields: Tensor, **named: Tensor) -> None:
        kept = int((self.stored_row[cells.flat] >= 0).sum())
        work.from_kept += kept
        work.anew += len(cells.flat) - kept
        add_cells(self, cells, *fields, **named)

    monkeypatch.setattr(joint_class, "_fill_cells", counted_fill)
    monkeypatch.setattr(joint_class, "_add_cell_gradients", counted_add)
    return work


INSIDE = 60 * 18 + 41 * 21  # cells of REALISTIC


@pytest.mark.parametrize(
    ("skip_below", "fewest", "most"),
    [(0.0, INSIDE, INSIDE), (1e-6, 1000, 1900), (1e-3, 500, 1000), (2.0, 0, 0)],
)
def test_skipping_leaves_out_what_no_alignment_uses(
    work: Work, skip_below: float, fewest: int, most: int
) -> None:
    _, gradients = REALISTIC.evenly().run(skip_below=skip_below, keep=0)
    assert work.forward == INSIDE
    assert work.from_kept == 0
    assert fewest <= work.anew <= most
    assert any(bool(g.any()) for g in gradients) == bool(most)


def test_what_is_kept_is_not_computed_again(work: Work) -> None:
    """There is room for the logits of 400 cells, so each utterance is a separate group.

    The cells with the highest probability are kept. If random cells were kept, ``from_kept`` would be 0.7 of
    ``anew``.
    """
    REALISTIC.evenly().run(skip_below=1e-2, keep=400 * 96 * 8)  # 96 classes of float64
    assert work.from_kept > 2 * work.anew > 0


def test_a_row_without_frames_does_not_make_gradients_uneven(work: Work) -> None:
    problem = RAGGED.evenly()
    problem.upstream[4] = 0.0
    _, gradients = problem.run(keep=2**20)
    assert work.anew == 0
    assert_gradients(gradients, oracle(problem)[1], 1e-12)


@pytest.mark.parametrize("keep", [0, 2**20])
def test_uneven_gradients_are_computed_anew_where_not_zero(work: Work, keep: int) -> None:
    """The forward pass over the lattice is not repeated: ``forward`` counts each cell once."""
    upstream = torch.tensor([0.0, 0.0, 2.0, 0.0, 5.0, 0.0], dtype=torch.float64)  # the fifth has no frames
    replace(RAGGED, upstream=upstream).run(keep=keep)
    inside = 9 * 5 + 1 * 3 + 4 * 1 + 6 * 6 + 0 + 1
    third_row = 4 * 1  # The only row with frames whose gradient from above is not zero.
    if keep:
        expected = Work(forward=inside, from_kept=inside, anew=third_row)
    else:
        expected = Work(forward=inside, from_kept=0, anew=inside + third_row)
    assert work == expected


def test_evaluation_forms_no_gradient(work: Work) -> None:
    with torch.no_grad():
        inputs = RAGGED.leaves()
        lengths = RAGGED.frames, RAGGED.symbols
        loss = transducer_loss(*inputs, RAGGED.labels, *lengths, blank=RAGGED.blank)  # type: ignore[misc]
    assert (work.from_kept, work.anew) == (0, 0)
    torch.testing.assert_close(loss, RAGGED.run()[0], rtol=1e-6, atol=0)


def test_a_second_backward_through_one_loss() -> None:
    problem = RAGGED.evenly()
    leaves = problem.leaves()
    lengths = problem.frames, problem.symbols
    loss = transducer_loss(*leaves, problem.labels, *lengths, blank=problem.blank, skip_below=0.0)  # type: ignore[misc]
    once = torch.autograd.grad(loss.sum(), leaves, retain_graph=True)
    twice = torch.autograd.grad(2 * loss.sum(), leaves)
    assert all(torch.equal(2 * a, b) for a, b in zip(once, twice, strict=True))


def test_dropout_does_not_move_with_padding_or_skipping() -> None:
    """The mask belongs to the cell, so an utterance's loss is the same alone, padded and among others."""
    alone = Problem.draw([5], [2])
    encoder, prediction, weight, bias = alone.inputs
    wide = replace(
        alone,
        inputs=(
            torch.cat((encoder, torch.ones(1, 4, 6)), 1),
            torch.cat((prediction, torch.ones(1, 3, 6)), 1),
            weight,
            bias,
        ),
        labels=torch.nn.functional.pad(alone.labels, (0, 3)),
    )
    options = {"dropout": 0.4, "seed": 3}
    assert torch.equal(alone.run(**options)[0], wide.run(**options)[0])
    _, every = alone.run(**options)
    _, skipping = alone.run(skip_below=1e-9, **options)
    assert_gradients(skipping, list(every), 1e-8)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.5])
def test_mask_has_its_rate_and_no_pattern(rate: float) -> None:
    """These means of the mask are within 5 standard deviations of their expectation:

    - the mean of the mask
    - the mean product of a unit in two utterances, and with two seeds
    - the mean product of neighbours in time, position and unit, and of the four corners of a square of these
    """
    mask, scale = joint_dropout_mask(2, 64, 32, 255, rate=rate, seed=11)
    other, _ = joint_dropout_mask(2, 64, 32, 255, rate=rate, seed=12)
    keep = 1 / scale
    assert abs(keep - (1 - rate)) < 1e-5
    kept, others = mask.float() - keep, other.float() - keep
    variance = keep * (1 - keep)

    def deviations(product: Tensor, factors: int) -> float:
        return float(product.double().mean().abs() * product.numel() ** 0.5 / variance ** (factors / 2))

    assert deviations(kept, 1) < 5
    assert deviations(kept[0] * kept[1], 2) < 5
    assert deviations(kept * others, 2) < 5
    pair = {
        axis: (kept.narrow(axis, 0, n - 1), kept.narrow(axis, 1, n - 1))
        for axis, n in ((1, 64), (2, 32), (3, 255))
    }
    for axis, (near, far) in pair.items():
        assert deviations(near * far, 2) < 5, f"neighbours along axis {axis}"
    for one, two in itertools.combinations((1, 2, 3), 2):
        square = kept
        for axis in (one, two):
            n = square.shape[axis]
            square = square.narrow(axis, 0, n - 1) * square.narrow(axis, 1, n - 1)
        assert deviations(square, 4) < 5, f"squares over axes {one} and {two}"
    for axes in ((0, 1, 2), (3,)):  # the rate of every unit, of every cell: chi-squared
        rates = kept.mean(axes)
        chi = float((rates.square() / (variance * rates.numel() / kept.numel())).sum())
        assert abs(chi - rates.numel()) < 5 * (2 * rates.numel()) ** 0.5


def test_hash_in_place_is_the_hash() -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (64, 33), dtype=torch.int32)
    words[0, :4] = torch.tensor([0, -1, 2**31 - 1, -(2**31)])
    expected, copy = mix(words), words.clone()
    mix_in_place(copy)
    assert torch.equal(copy, expected)
    unsigned = words[0, 1].item() % 2**32
    for multiplier in (0x7FEB352D, 0x846CA68B):
        unsigned = ((unsigned ^ (unsigned >> 16)) * multiplier) % 2**32
    assert (unsigned ^ (unsigned >> 16)) == expected[0, 1].item() % 2**32


@FORMS
def test_seed_as_tensor(static: bool) -> None:
    as_int = RAGGED.run(static=static, dropout=0.5, seed=2**40 + 3)
    as_tensor = RAGGED.run(static=static, dropout=0.5, seed=torch.tensor(2**40 + 3))
    halves = torch.tensor([3, 2**8], dtype=torch.int32)
    assert torch.equal(as_int[0], as_tensor[0])
    assert torch.equal(as_int[0], RAGGED.run(static=static, dropout=0.5, seed=halves)[0])
    assert not torch.equal(as_int[0], RAGGED.run(static=static, dropout=0.5, seed=3)[0])


@pytest.mark.parametrize("spread", [0.5, 1.0, 20.0])
def test_static_form_in_fp32(spread: float) -> None:
    """Diagonals in fp32 against the rows' float64, on a lattice whose loss is in the hundreds."""
    problem = Problem.draw([120, 75], [30, 24], hidden=32, vocabulary=48, spread=spread)
    loss, gradients = problem.run(torch.float32, static=True, dropout=0.1, seed=1)
    true_loss, true = problem.run(torch.float64, dropout=0.1, seed=1)
    torch.testing.assert_close(loss.double(), true_loss, rtol=2e-6, atol=0)
    assert_gradients(gradients, list(true), 5e-6)


@FORMS
def test_bf16_products(static: bool) -> None:
    loss, gradients = REALISTIC.run(torch.float32, compute_dtype=torch.bfloat16, static=static)
    true_loss, true = oracle(REALISTIC)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), true_loss, rtol=2e-3, atol=0)
    assert_gradients(gradients, true, 1.5e-2)
    assert float((gradients[2] - true[2]).norm() / true[2].norm()) > 1e-4, "these were no bfloat16 products"


def test_bf16_inputs_and_their_gradients() -> None:
    loss, gradients = REALISTIC.run(torch.bfloat16, compute_dtype=torch.bfloat16)
    assert loss.dtype == torch.float32
    assert [g.dtype for g in gradients] == [torch.bfloat16] * 4
    assert_gradients(gradients, oracle(REALISTIC)[1], 2e-2)


@FORMS
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast_does_not_leak_in(static: bool, low: torch.dtype) -> None:
    plain = REALISTIC.run(torch.float32, static=static)
    with torch.autocast("cpu", dtype=low):
        cast = REALISTIC.run(torch.float32, static=static)
    assert torch.equal(plain[0], cast[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[1], cast[1], strict=True))


def test_second_derivative_is_refused() -> None:
    encoder, prediction, weight, bias = RAGGED.leaves()
    lengths = RAGGED.frames, RAGGED.symbols
    loss = transducer_loss(encoder, prediction, weight, bias, RAGGED.labels, *lengths, blank=RAGGED.blank)
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad((factor * loss).sum(), bias, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.backward(gradient.sum())


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@FORMS
def test_the_lattice_is_never_held(static: bool) -> None:
    problem = Problem.draw([20, 13], [7, 9], hidden=16, vocabulary=50)
    with _Largest() as largest:
        problem.run(torch.float32, static=static, chunk=40, keep=40 * 50 * 4, dropout=0.2)
    chunk_elements = 40 * 50
    lattice_elements = 2 * 20 * 10 * 50  # rows × frames × positions × classes
    assert chunk_elements == lattice_elements / 10
    assert largest.elements <= chunk_elements


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), min_size=1, max_size=4),
    hidden=st.integers(1, 9),
    vocabulary=st.integers(2, 9),
    blank_first=st.booleans(),
    chunk=st.integers(1, 40),
    keep=st.integers(0, 4000),
    is_even=st.booleans(),
    rate=st.sampled_from([0.0, 0.25]),
    fastemit=st.sampled_from([0.0, 0.1]),
    static=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_shape(
    lengths: list[tuple[int, int]],
    hidden: int,
    vocabulary: int,
    blank_first: bool,
    chunk: int,
    keep: int,
    is_even: bool,
    rate: float,
    fastemit: float,
    static: bool,
    seed: int,
) -> None:
    frames, symbols = zip(*lengths, strict=True)
    problem = Problem.draw([*frames], [*symbols], hidden, vocabulary, seed=seed % 1000)
    problem = problem.evenly() if is_even else problem
    true_loss, true = oracle(problem, rate, seed, fastemit)
    if blank_first:  # The same problem, with the blank as the first class instead of the last.
        encoder, prediction, weight, bias = problem.inputs
        inputs = (encoder, prediction, weight.roll(1, 0), bias.roll(1))
        problem = replace(problem, inputs=inputs, labels=problem.labels + 1)
        true = [true[0], true[1], true[2].roll(1, 0), true[3].roll(1)]
    options = {"chunk": chunk, "keep": keep, "dropout": rate, "seed": seed, "fastemit": fastemit}
    loss, gradients = problem.run(blank=0 if blank_first else problem.blank, static=static, **options)
    torch.testing.assert_close(loss, true_loss, rtol=1e-11, atol=1e-11)
    for ours, exact in zip(gradients, true, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": RAGGED.labels + 6}, "outside the vocabulary of 7"),
        ({"labels": torch.full_like(RAGGED.labels, 6)}, "is the blank 6"),
        ({"frames": RAGGED.frames + 1}, "do not fit 9 frames"),
        ({"symbols": RAGGED.symbols + 1}, "and 5 labels"),
        ({"labels": RAGGED.labels[:, 1:]}, r"labels .* must be \(B U\)"),
        ({"inputs": (RAGGED.inputs[0][:, :0], *RAGGED.inputs[1:])}, "no utterance, frame or unit"),
    ],
)
def test_contents_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(RAGGED, **change).run()


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 1.0},
        {"dropout": -0.1},
        {"fastemit": -1.0},
        {"delay_penalty": -1.0},
        {"chunk": 0},
        {"activation": "gelu"},
        {"compute_dtype": torch.float16},
    ],
)
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"dropout|delay_penalty -1|fastemit is -1|chunk 0|dtype|activation"):
        RAGGED.run(**options)
