from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from speechtrain.losses.contrastive import contrastive_loss, nats_to_bits
from speechtrain.nn.masking import SpanMask, frame_table, sample_negatives
from speechtrain.nn.quantizer import GumbelQuantizer, gumbel

ROWS, FRAMES, WIDTH, HIDDEN, NEGATIVES, ENTRIES = 3, 70, 10, 14, 15, 5


@dataclass
class Result:
    """A loss, its parts, the gradients of all parameters, and the metrics that fairseq logs with the loss."""

    loss: Tensor
    diversity: Tensor
    accuracy: float
    perplexities: tuple[float, float]
    shared: float
    grads: dict[str, Tensor]


class Parts(nn.Module):
    """The parts of a wav2vec 2.0 model between its networks (extractor, transformer) and its loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quantizer = GumbelQuantizer(WIDTH, 12, groups=2, entries=ENTRIES)
        self.project_q = nn.Linear(12, 6)
        self.final_proj = nn.Linear(HIDDEN, 6)
        self.features = nn.Parameter(torch.randn(ROWS, FRAMES, WIDTH))
        self.hidden = nn.Parameter(torch.randn(ROWS, FRAMES, HIDDEN))
        self.to(dtype)

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}


def dynamic_result(
    parts: Parts,
    mask: NDArray[np.bool_],
    negatives: Tensor,
    noise: Tensor,
    tau: float,
    lengths: Sequence[int],
) -> Result:
    """wav2vec 2.0's objective as published, row by row and with data-dependent shapes.

    This function shares no code with the project. It uses boolean indexing, a copy of every negative, torch's
    cosine similarity, −inf for negatives that are equal to the positive, and an indexed Gumbel softmax.
    """
    quantizer, where = parts.quantizer, torch.from_numpy(mask)
    logits = F.linear(parts.features[where], quantizer.projection.weight, quantizer.projection.bias)
    logits = logits.view(-1, ENTRIES)
    soft = ((logits + noise[where].reshape(-1, ENTRIES)) / tau).softmax(-1)
    hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
    choice = (hard - soft.detach() + soft).view(-1, 2 * ENTRIES, 1)
    codes = (choice * quantizer.codebook.view(1, 2 * ENTRIES, 6)).view(-1, 2, ENTRIES, 6).sum(2)
    y_all = parts.project_q(codes.reshape(-1, 12))
    x_all = parts.final_proj(parts.hidden[where])
    code_of = soft.argmax(-1).view(-1, 2)

    average = logits.view(-1, 2, ENTRIES).softmax(-1).mean(0)
    prob_perplexity = torch.exp(-(average * torch.log(average + 1e-7)).sum(-1)).sum()
    used = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    used = used.view(-1, 2, ENTRIES).mean(0)
    code_perplexity = torch.exp(-(used * torch.log(used + 1e-7)).sum(-1)).sum()
    diversity = (2 * ENTRIES - prob_perplexity) / (2 * ENTRIES)

    counts = mask.sum(1).tolist()
    total, correct, shared = torch.zeros((), dtype=x_all.dtype), 0, 0
    for row, (x, y, ids) in enumerate(zip(*(t.split(counts) for t in (x_all, y_all, code_of)), strict=True)):
        index = negatives[row, : counts[row]].long()
        candidates = torch.cat([y[None], y[index].transpose(0, 1)])  # (1 + K, M, D)
        scores = torch.cosine_similarity(x[None].expand_as(candidates), candidates, dim=-1) / 0.1
        is_positive = (ids[index] == ids[:, None]).all(-1).t()
        scores[1:][is_positive] = float("-inf")
        scores = scores.t()
        total = total + F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long), reduction="sum")
        # As fairseq does: a frame is not correct if all its candidates have the same score, so that the first
        # candidate, the positive, is the largest and the smallest.
        largest, smallest = scores.argmax(-1) == 0, scores.argmin(-1) == 0
        correct += int(largest.sum() - (largest & smallest).sum())
        shared += int(is_positive.sum())

    valid = torch.arange(FRAMES) < torch.tensor(lengths)[:, None]
    penalty = parts.features[valid].pow(2).mean()
    frames = sum(counts)
    parts.zero_grad()
    (total + 0.1 * diversity * frames + 10 * penalty * frames).backward()
    return Result(
        total.detach(),
        diversity.detach(),
        correct / frames,
        (float(prob_perplexity.detach()), float(code_perplexity)),
        shared,
        parts.gradients(),
    )


def static_result(
    parts: Parts,
    mask: NDArray[np.bool_],
    negatives: Tensor,
    noise: Tensor,
    tau: float,
    lengths: Sequence[int],
    width: int | None,
) -> Result:
    """The same objective from this project's parts.

    Each row has ``width`` entries. Those after the masked frames of the row are its surplus.
    """
    index, weight = frame_table(mask, width)

    def at(x: Tensor) -> Tensor:
        return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))

    drawn = at(noise.flatten(2)).unflatten(2, (2, ENTRIES))
    # Surplus entries may have any finite values, because their weight is 0.
    drawn = drawn + 7 * torch.randn_like(drawn) * (1 - weight[..., None, None])
    out = parts.quantizer(at(parts.features), torch.tensor(tau, dtype=noise.dtype), weight, drawn)
    context, targets = parts.final_proj(at(parts.hidden)), parts.project_q(out.codes)
    contrastive = contrastive_loss(context, targets, out.ids, negatives, weight)
    valid = (torch.arange(FRAMES) < torch.tensor(lengths)[:, None])[..., None]
    penalty = (parts.features * valid).pow(2).sum() / (valid.sum() * WIDTH)
    frames = contrastive.frames
    assert frames == mask.sum()
    assert torch.equal(out.frames, frames.to(out.frames.dtype))
    parts.zero_grad()
    (contrastive.loss + 0.1 * out.diversity() * frames + 10 * penalty * frames).backward()
    return Result(
        contrastive.loss.detach(),
        out.diversity().detach(),
        float(contrastive.correct / frames),
        (float(out.prob_perplexity().detach().sum()), float(out.code_perplexity().sum())),
        float(contrastive.shared),
        parts.gradients(),
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("has_surplus", [False, True], ids=["None", "most"])
@pytest.mark.parametrize("lengths", [(FRAMES,) * ROWS, (FRAMES, 41, 55)])
def test_static_shapes_give_the_dynamic_loss_and_gradients(
    dtype: torch.dtype, tolerance: float, equal: bool, has_surplus: bool, lengths: tuple[int, ...]
) -> None:
    spans = SpanMask()
    mask = spans.sample(lengths, FRAMES, seed=1, equal=equal)
    counts = mask.sum(1).tolist()
    assert (len(set(counts)) == 1) == equal
    width = spans.max_masked_frames(FRAMES) if has_surplus else None
    negatives = sample_negatives(counts, width or max(counts), NEGATIVES, seed=2)
    noise = gumbel(torch.rand(ROWS, FRAMES, 2, ENTRIES))
    # The expected result is in float64 for both precisions, with the same weights.
    expected = dynamic_result(Parts(torch.float64), mask, negatives, noise.double(), 0.8, lengths)
    got = static_result(Parts(dtype), mask, negatives, noise.to(dtype), 0.8, lengths, width)
    assert float((got.loss - expected.loss).abs()) <= tolerance * float(expected.loss)
    assert float((got.diversity - expected.diversity).abs()) <= tolerance  # The largest diversity is 1.
    assert expected.grads.keys() == got.grads.keys() == dict(Parts(dtype).named_parameters()).keys()
    for name, gradient in expected.grads.items():
        scale = gradient.norm()
        if name.endswith("bias"):
            # The gradient of a bias is a sum over frames that almost cancel, so the error is relative to the
            # gradient of the weight.
            scale = max(scale, expected.grads[name.removesuffix("bias") + "weight"].norm())
        error = (got.grads[name] - gradient).norm() / scale
        assert float(error) <= tolerance, name
    assert got.accuracy == pytest.approx(expected.accuracy, abs=1e-7)
    assert got.perplexities == pytest.approx(expected.perplexities, rel=1e-5)
    assert got.shared == expected.shared > 0  # With five entries a group, some negatives equal the positive.


def random_inputs(rows: int = 2, frames: int = 9, width: int = 5, seed: int = 0) -> tuple[Tensor, ...]:
    """Return random context and targets, ids that are all different, negatives and weights of 1."""
    torch.manual_seed(seed)
    x, y = torch.randn(2, rows, frames, width).unbind(0)
    ids = torch.arange(frames).expand(rows, frames)[..., None]
    return x, y, ids, sample_negatives([frames] * rows, frames, 20, seed), torch.ones(rows, frames)


def test_chance_is_the_logarithm_of_the_candidates() -> None:
    x, y, ids, _, weight = random_inputs(frames=150)
    negatives = sample_negatives([150, 150], 150, 100, 0)
    # At a high temperature, all 101 candidates have the same probability: log2(101) = 6.658 bits a frame.
    out = contrastive_loss(x, y, ids, negatives, weight, torch.tensor(1e6))
    assert float(nats_to_bits(out.loss) / out.frames) == pytest.approx(6.6582, abs=1e-3)
    assert nats_to_bits(torch.tensor(math.log(2))) == 1.0
    chance = contrastive_loss(x, y, ids, negatives, weight)
    assert float(chance.correct / chance.frames) == pytest.approx(1 / 101, abs=0.02)
    exact = contrastive_loss(y, y, ids, negatives, weight)
    assert exact.correct == exact.frames == 300


def test_a_collapse_shows_in_the_counts() -> None:
    x, y, ids, negatives, weight = random_inputs()
    healthy = contrastive_loss(x, y, ids, negatives, weight)
    assert (float(healthy.shared), float(healthy.distinct), float(healthy.frames)) == (0, 18, 18)
    collapsed = contrastive_loss(x, y, torch.zeros_like(ids), negatives, weight)
    assert collapsed.loss == 0
    assert collapsed.shared == 18 * 20
    assert collapsed.distinct == 2  # one code in each utterance
    assert collapsed.correct == 18  # No negative is left, so every frame is correct, as in fairseq.
    # A negative counts as shared only if its ids agree in all groups.
    half = torch.stack([torch.zeros(2, 9).long(), torch.arange(9).expand(2, 9)], 2)
    assert contrastive_loss(x, y, half, negatives, weight).shared == 0
    few = torch.tensor([[0, 0, 1, 1, 2, 2, 0, 1, 2], [5, 5, 5, 5, 5, 5, 5, 5, 6]])[..., None]
    assert contrastive_loss(x, y, few, negatives, weight).distinct == 5


def test_rows_whose_candidates_all_score_alike_are_not_correct() -> None:
    # fairseq counts the frames with argmax == 0, and subtracts those whose argmin is 0, too.
    x, y, ids, negatives, weight = random_inputs()
    y[0] = y[0, :1]
    out = contrastive_loss(torch.ones_like(x), y, ids, negatives, weight)
    assert out.correct <= 9
    assert contrastive_loss(torch.ones_like(x), y[:, :1].expand_as(y), ids, negatives, weight).correct == 0


def test_a_row_with_one_masked_frame_costs_nothing() -> None:
    x, y, ids, _, _ = random_inputs(frames=4)
    weight = (torch.arange(4) < torch.tensor([[4], [1]])).float()
    negatives = sample_negatives([4, 1], 4, 20, 3)
    x.requires_grad_()
    out = contrastive_loss(x, y, ids, negatives, weight)
    (gradient,) = torch.autograd.grad(out.loss, x)
    assert out.loss.isfinite()
    assert gradient[0].any()
    assert not gradient[1].any()


def test_cosine_without_broadcasting_is_the_cosine() -> None:
    # The Gaudi port of fairseq computes the cosine from x·y, |x|² and |y|². The results of this port,
    # of torch and of this project are equal.
    torch.manual_seed(0)
    x, y = torch.randn(2, 40, 16), torch.randn(2, 40, 16)
    ids = torch.arange(40).expand(2, 40)[..., None]
    negatives = torch.tensor([[j for j in range(40) if j != i] for i in range(40)]).expand(2, 40, 39)
    usual = torch.cosine_similarity(x[:, :, None], y[:, None], dim=-1)
    w12 = (x[:, :, None] * y[:, None]).sum(-1)
    w1, w2 = (x * x).sum(-1), (y * y).sum(-1)
    gaudi = w12 / (w1[:, :, None] * w2[:, None]).clamp(min=1e-16).sqrt()
    torch.testing.assert_close(gaudi, usual, rtol=1e-6, atol=1e-6)
    for scores in (usual, gaudi):
        expected = -(scores / 0.1).log_softmax(2).diagonal(dim1=1, dim2=2).sum()
        got = contrastive_loss(x, y, ids, negatives, torch.ones(2, 40)).loss
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    zero = torch.zeros(1, 3, 4, requires_grad=True)
    drawn = sample_negatives([3], 3, 4, 0)
    loss = contrastive_loss(zero, zero.detach(), ids[:1, :3], drawn, torch.ones(1, 3)).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(3 * math.log(5))
    assert zero.grad is not None
    assert zero.grad.isfinite().all()


def test_autocast_does_not_reach_the_loss() -> None:
    inputs = random_inputs()
    plain = contrastive_loss(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        cast = contrastive_loss(*inputs)
        half = contrastive_loss(inputs[0].bfloat16(), inputs[1].bfloat16(), *inputs[2:])
    assert torch.equal(plain.loss, cast.loss)
    assert half.loss.dtype == torch.float32
    torch.testing.assert_close(half.loss, plain.loss, rtol=2e-2, atol=0)
