from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from speechtrain.nn.quantizer import GumbelQuantizer, code_temperature, perplexity


def quantizer(seed: int = 0, groups: int = 2, entries: int = 12) -> GumbelQuantizer:
    torch.manual_seed(seed)
    return GumbelQuantizer(input_width=10, code_width=8 * groups, groups=groups, entries=entries)


def selected(module: GumbelQuantizer, ids: Tensor) -> Tensor:
    """The entries of (N, G) ids by plain indexing, (N, code width)."""
    return torch.cat([module.codebook[g, ids[:, g]] for g in range(module.groups)], 1)


def test_shapes_and_initial_values_are_the_published_ones() -> None:
    torch.manual_seed(0)
    module = GumbelQuantizer()
    assert {k: tuple(v.shape) for k, v in module.state_dict().items()} == {
        "codebook": (2, 320, 128),
        "projection.weight": (640, 512),
        "projection.bias": (640,),
    }
    weight = module.projection.weight.detach()
    assert (abs(float(weight.mean())), float(weight.std())) == pytest.approx((0.0, 1.0), abs=0.01)
    assert not module.projection.bias.any()
    book = module.codebook.detach()
    assert 0 <= book.min() < 0.001
    assert 0.999 < book.max() < 1
    assert (float(book.mean()), float(book.var())) == pytest.approx((0.5, 1 / 12), abs=0.01)


def test_a_narrower_start_lets_the_noise_choose() -> None:
    torch.manual_seed(0)
    alike = torch.randn(512) + 0.1 * torch.randn(300, 512)  # frames that hardly differ
    in_use = []
    for init_std in (1.0, 0.3, 0.01):
        module = GumbelQuantizer(init_std=init_std)
        assert float(module.projection.weight.detach().std()) == pytest.approx(init_std, rel=0.01)
        in_use.append(len(module(alike, 2.0, torch.ones(300)).ids[:, 0].unique()))
    assert in_use[0] < in_use[1] < in_use[2]


@pytest.mark.parametrize("groups", [1, 2])
def test_forward_is_the_broadcast_sum_without_its_tensor(groups: int) -> None:
    module = quantizer(groups=groups, entries=320)
    x, noise = torch.randn(90, 10), torch.randn(90, groups, 320)
    weight = torch.arange(8.0 * groups)
    largest = 0

    def largest_saved(tensor: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    gradients, codes = [], []
    for is_broadcast in (False, True):
        module.zero_grad()
        if is_broadcast:
            noisy_logits = module.projection(x).view(90, groups, 320) + noise
            probabilities = (noisy_logits / 0.7).softmax(-1)
            hard = F.one_hot(noisy_logits.argmax(-1), 320)
            selection = hard + (probabilities - probabilities.detach())
            products = selection.reshape(90, groups * 320, 1) * module.codebook.reshape(1, groups * 320, 8)
            result = products.view(90, groups, 320, 8).sum(2).reshape(90, -1)
        else:
            with torch.autograd.graph.saved_tensors_hooks(largest_saved, lambda tensor: tensor):
                result = module(x, 0.7, torch.ones(90), noise).codes
        (result * weight).sum().backward()
        codes.append(result.detach())
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])
    torch.testing.assert_close(codes[0], codes[1], rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    assert 0 < largest <= 90 * groups * 320  # the broadcast product has 8 times as many values


@pytest.mark.parametrize("training", [True, False])
def test_forward_is_exactly_the_selected_entries(training: bool) -> None:
    module = quantizer().train(training)
    x = torch.randn(400, 10)
    out = module(x, 0.7, torch.ones(400))
    assert out.ids.shape == (400, 2)
    assert out.ids.dtype == torch.int64
    assert torch.equal(out.codes, selected(module, out.ids))  # bit for bit: equal ids, equal codes
    assert len(out.codes.unique(dim=0)) == len(out.ids.unique(dim=0)) > 50
    logits = module.projection(x).view(400, 2, 12)
    assert torch.equal(out.ids, logits.argmax(-1)) is not training


def test_the_choice_is_of_logits_plus_noise_by_the_softmax() -> None:
    module = quantizer()
    x, noise = torch.randn(50, 10), torch.randn(50, 2, 12)
    out = module(x, 0.7, torch.ones(50), noise)
    assert torch.equal(out.ids, (module.projection(x).view(50, 2, 12) + noise).argmax(-1))
    # Gumbel's theorem: drawn noise selects with the probabilities of the softmax, at any temperature
    one = 0.1 * torch.randn(10)
    drawn = module(one.expand(60000, 10), 0.1, torch.ones(60000)).ids
    expected = module.projection(one).view(2, 12).softmax(-1)
    for group in range(2):
        shares = drawn[:, group].bincount(minlength=12) / 60000
        torch.testing.assert_close(shares, expected[group].detach(), atol=0.006, rtol=0)


def test_statistics_of_parts_add_up_to_those_of_the_whole() -> None:
    module = quantizer()
    x = torch.randn(2, 30, 10)
    weight = (torch.arange(30) < torch.tensor([[30], [17]])).float()
    out = module(x, 2.0, weight)
    parts = [module(x[i : i + 1], 2.0, weight[i : i + 1]) for i in range(2)]
    torch.testing.assert_close(parts[0].soft + parts[1].soft, out.soft)
    torch.testing.assert_close(
        perplexity(parts[0].hard + parts[1].hard, parts[0].frames + parts[1].frames), out.code_perplexity()
    )


def test_diversity_has_a_gradient_and_codes_in_use_have_none() -> None:
    module = quantizer().double()
    x = torch.randn(40, 10, dtype=torch.double)
    weight = torch.ones(40, dtype=torch.double)
    noise = torch.zeros(40, 2, 12, dtype=torch.double)

    def diversity(bias: Tensor) -> Tensor:
        return torch.func.functional_call(
            module, {"projection.bias": bias}, (x, 1.0, weight, noise)
        ).diversity()

    start = module.projection.bias.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(diversity, (start,))
    assert not module(x, 1.0, weight).hard.requires_grad


def test_autocast_does_not_reach_the_quantizer() -> None:
    module, x = quantizer(), torch.randn(30, 10)
    noise = torch.randn(30, 2, 12)
    plain = module(x, 0.5, torch.ones(30), noise)
    with torch.autocast("cpu", torch.bfloat16):
        cast = module(x, 0.5, torch.ones(30), noise)
        half = module(x.bfloat16(), torch.tensor(0.5), torch.ones(30), noise)
    for field in plain._fields:
        assert torch.equal(getattr(plain, field), getattr(cast, field))
    assert half.codes.dtype == half.soft.dtype == torch.float32


def test_temperature_falls_by_the_published_schedule() -> None:
    assert code_temperature(0) == 2.0
    assert code_temperature(100_000) == pytest.approx(1.21306, abs=5e-6)
    assert code_temperature(277_258) == pytest.approx(0.5, abs=1e-6)  # the reference's update, rounded down
    assert code_temperature(277_258) > 0.5 == code_temperature(277_259)
    assert code_temperature(599_144, floor=0.1) > 0.1
    assert code_temperature(599_145, floor=0.1) == 0.1
    assert code_temperature(10**7) == 0.5
