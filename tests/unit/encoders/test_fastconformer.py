"""FastConformer: equal to transformers' Parakeet encoder, and independent of padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from speechtrain.batch import Batch
from speechtrain.compute_policy import STATIC, apply_policy
from speechtrain.encoders.fastconformer import FastConformer
from speechtrain.features.augment import Augment
from speechtrain.features.logmel import LogMel
from speechtrain.nn import conformer
from speechtrain.start.build import build_encoder
from speechtrain.start.compose import compose
from speechtrain.start.run_config import run_config
from tests.support.noise import batch
from tools.rehearsal.operations import GAUDI
from tools.rehearsal.recorder import Recorder

NOTHING_DROPPED = dict.fromkeys(
    ("dropout", "attention_dropout", "activation_dropout", "residual_dropout"), 0.0
)


def encoder(**changes: Any) -> FastConformer:
    torch.manual_seed(3)
    features = LogMel(
        window_seconds=0.025,
        mels=16,
        form="parakeet",
        padding="constant",
        log_floor=2**-24,
        splice=1,
        dither=0.0,
    )
    sizes = {"width": 32, "layers": 2, "feed_forward": 64, "heads": 4, "subsampling": 4, "channels": 16}
    made = FastConformer(features, Augment(), **{**sizes, **NOTHING_DROPPED, **changes})  # type: ignore[arg-type]
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.1)
    return made


def theirs(**changes: Any) -> Any:
    parakeet = pytest.importorskip("transformers.models.parakeet.modeling_parakeet")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4}
    sizes |= {"num_mel_bins": 16, "subsampling_factor": 4, "subsampling_conv_channels": 16, "layerdrop": 0.0}
    none = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    return parakeet.ParakeetEncoder(parakeet.ParakeetEncoderConfig(**{**sizes, **none, **changes}))


def extracted(given: Batch) -> tuple[Tensor, Tensor]:
    """Parakeet's own features and their mask."""
    transformers = pytest.importorskip("transformers")
    extractor = transformers.ParakeetFeatureExtractor(feature_size=16)
    rows = [row[:n].numpy() for row, n in zip(given.audio, given.audio_lengths.tolist(), strict=True)]
    found = extractor(rows, sampling_rate=16000, return_tensors="pt")
    return found.input_features, found.attention_mask


@pytest.mark.parametrize(
    ("ours", "other"),
    [
        ({}, {}),
        ({"subsampling": 8, "kernel": 5}, {"subsampling_factor": 8, "conv_kernel_size": 5}),
        ({"scale_input": False, "subsampling": 2}, {"scale_input": False, "subsampling_factor": 2}),
        (
            {"attention_bias": False, "convolution_bias": False},
            {"attention_bias": False, "convolution_bias": False},
        ),
    ],
)
def test_it_is_parakeets(ours: dict[str, Any], other: dict[str, Any]) -> None:
    mine, reference, given = encoder(**ours).eval(), theirs(**other).eval(), batch(16000, 12345, 4000, 639)
    reference.load_state_dict(mine.state_dict())
    features, mask = extracted(given)
    with torch.no_grad():
        x, counts = mine.features(given.audio, given.audio_lengths)
        frames, lengths = mine(given)
        expected = reference(features, mask)
    assert torch.equal(counts, mask.sum(1))
    torch.testing.assert_close(x, features[:, : x.shape[1]], atol=1e-4, rtol=0)
    assert torch.equal(lengths, expected.attention_mask.sum(1))
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(
            frames[row, :length], expected.last_hidden_state[row, :length], atol=1e-4, rtol=0
        )


def gradients(module: nn.Module, frames: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    inside = torch.arange(frames.shape[1]) < lengths[:, None]
    weight = torch.linspace(-1, 1, frames.shape[2])
    module.zero_grad()
    ((frames * weight).square() * inside[..., None]).sum().backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert len(found) == len(list(module.parameters()))
    return found


@pytest.mark.parametrize("samples", [(16000, 16000, 16000), (16000, 12345, 4000)])
def test_its_gradients_are_parakeets(samples: tuple[int, ...]) -> None:
    """In training on rows of equal length; ragged ones with running statistics, as theirs count padding."""
    mine, reference, given = encoder(), theirs(), batch(*samples)
    reference.load_state_dict(mine.state_dict())
    is_training = len(set(samples)) == 1
    mine.train(is_training)
    reference.train(is_training)
    features, mask = extracted(given)
    if is_training:  # their extractor has one column beyond the last frame, which their statistics count
        features, mask = features[:, :-1], mask[:, :-1]
    frames, lengths = mine(given)
    found = gradients(mine, frames, lengths)
    expected = gradients(reference, reference(features, mask).last_hidden_state, lengths)
    # The gradient of a bias before a BatchNorm is 0 except for rounding errors. The largest gradient is 73.
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], atol=1e-4 * float(expected[name].abs().max()) + 1e-4, rtol=0, msg=name
        )


def test_slices_of_rows_change_the_memory_and_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []

    def gradients(values_of_slice: int) -> tuple[list[Tensor], int]:
        monkeypatch.setattr(conformer, "_SLICE_VALUES", values_of_slice)
        made, kept[:] = encoder().subsampling, []
        x = torch.randn(5, 90, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            y, lengths = made(x, torch.tensor([90, 71, 50, 9, 0]))
        of_forward = sum(kept)
        y.square().sum().backward()
        return [y, lengths, x.grad, *(p.grad for p in made.parameters())], of_forward

    whole, much = gradients(2**30)
    sliced, little = gradients(2 * 16 * 16 * 90 // 4)  # two rows
    for one, other in zip(sliced, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
    assert little < much / 3
    static = encoder().subsampling
    static.apply_policy(STATIC)
    assert static(torch.randn(5, 90, 16), torch.full((5,), 90))[0].shape == whole[0].shape


def test_a_limited_context_hides_what_is_further_away() -> None:
    """One layer without its convolutions sees two frames back and one ahead."""
    mine = encoder(layers=1, context=[2, 1, 1], kernel=1).eval()
    features, lengths = torch.randn(1, 80, 16), torch.tensor([80])
    changed = features.clone()
    changed[:, 40:44] += 1.0  # output frames 9 to 11 see them through the subsampling
    with torch.no_grad():
        one, other = (mine.contextualise(x, lengths)[0][0] for x in (features, changed))
    differs = (one - other).abs().amax(1) > 1e-6
    assert not differs[:8].any()
    assert differs[9:13].all()
    assert not differs[14:].any()


def test_layer_drop_skips_a_layer_and_keeps_its_gradient() -> None:
    mine, given = encoder(layer_drop=0.5).train(), batch(8000, 6000)
    mine.advance(0, 11)
    prepared = mine.prepare(given, 0)
    assert prepared.extra["keep"].tolist() == mine.prepare(given, 7).extra["keep"].tolist()
    x, lengths = mine.features(given.audio, given.audio_lengths)
    frames, _ = mine.contextualise(x, lengths, torch.tensor([0.0, 1.0]))
    frames.sum().backward()  # type: ignore[no-untyped-call]
    assert not any(
        parameter.grad.any() for parameter in mine.layers[0].parameters() if parameter.grad is not None
    )
    assert mine.eval().prepare(given, 0).extra == {}
    draws, kept = encoder(layer_drop=0.5, layers=1).train(), []
    for seed in range(400):
        draws.advance(0, seed)
        kept.append(float(draws.prepare(given, 0).extra["keep"]))
    assert np.mean(kept) == pytest.approx(0.5, abs=0.1)


def test_it_is_fit_for_gaudi() -> None:
    mine, recorder = encoder(dropout=0.1, residual_dropout=0.1).train(), Recorder(GAUDI)
    apply_policy(mine, replace(STATIC, mark_step=recorder.mark_step))
    given = batch(16000, 12345)
    moved = recorder.move(given)
    for step in (recorder.warm_up(), recorder):
        mine.zero_grad()
        with step:
            frames, _ = mine(moved)
            torch.autograd.backward(frames.square().sum())
    assert recorder.costs.reads == 0


@pytest.mark.parametrize(
    ("size", "arguments"),
    [
        ("large", {"hidden_size": 512, "num_hidden_layers": 17, "intermediate_size": 2048}),
        ("xlarge", {}),
        ("xxlarge", {"num_hidden_layers": 42}),
    ],
)
def test_published_sizes_have_parakeets_parameters(size: str, arguments: dict[str, int]) -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        theirs = transformers.AutoModel.from_config(transformers.ParakeetEncoderConfig(**arguments))
        ours = build_encoder(
            run_config(compose(["model=rnnt", f"encoder=fastconformer_{size}", "data=digits"]))
        )
    count = sum(parameter.numel() for parameter in ours.parameters())
    assert count == sum(parameter.numel() for parameter in theirs.parameters())
    published = {"large": 109e6, "xlarge": 0.6e9, "xxlarge": 1.1e9}[size]
    assert count == pytest.approx(published, rel=0.04)
