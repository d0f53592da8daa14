"""The whole pretraining objective against Hugging Face's: hidden states, loss, every gradient.

Both get the same weights, mask, negatives and Gumbel noise; feature penalty 0, gradient multiplier 1, no
dropout. ``gumbel_softmax`` is replaced while Hugging Face's model runs, by the same formula on the given
noise, with its straight-through sum in the order in which it is exact: torch's own order leaves rounding in
the codes, and then Hugging Face's exact test for negatives that carry the positive's code misses some.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.encoders.wav2vec2 import Wav2Vec2Encoder
from speechtrain.interop import wav2vec2_hf
from speechtrain.interop.pretrained import Pretrained, describe, export_tensors
from speechtrain.models.wav2vec2 import Wav2Vec2
from speechtrain.nn.masking import SpanMask
from speechtrain.nn.quantizer import gumbel

transformers = pytest.importorskip("transformers")

THIN = [[32, 10, 5], *[[32, 3, 2]] * 4, *[[32, 2, 2]] * 2]
CALM = dict.fromkeys(
    ("dropout", "attention_dropout", "activation_dropout", "input_dropout", "layer_drop"), 0.0
) | {"gradient_scale": 1.0}
LARGE = {"conv_norm": "layer", "conv_bias": True, "pre_norm": True}
SMALL = {"conv_layers": THIN, "width": 48, "layers": 3, "feed_forward": 96, "heads": 4}


def make(encoder: dict[str, Any], model: dict[str, Any], dtype: torch.dtype) -> Wav2Vec2:
    torch.manual_seed(0)
    built = Wav2Vec2Encoder(**(CALM | {"mask": SpanMask()} | encoder))
    return Wav2Vec2(built, **model, penalty_weight=0.0, target_dropout=0.0).to(dtype).train()


def make_batch(task: Wav2Vec2, lengths: list[int], dtype: torch.dtype) -> Batch:
    torch.manual_seed(1)
    samples, rows = torch.tensor(lengths), len(lengths)
    audio = torch.randn(rows, max(lengths)) * 0.3 * (torch.arange(max(lengths)) < samples[:, None])
    empty = torch.zeros(rows, dtype=torch.int64)
    batch = Batch(
        audio.to(dtype),
        samples,
        empty[:, None],
        empty,
        torch.ones(rows, dtype=dtype),
        torch.arange(rows),
        tuple("abcdef"[:rows]),
        ("",) * rows,
    )
    task.advance(0, 5)
    drawn = task.prepare(batch, 7)
    shape = (rows, drawn.extra["mask"].shape[1], task.quantizer.groups, task.quantizer.entries)
    return replace(drawn, extra=drawn.extra | {"all_noise": gumbel(torch.rand(shape, dtype=dtype))})


def hf_model(pretrained: Pretrained, dtype: torch.dtype) -> Any:
    model = wav2vec2_hf._build_model(pretrained)
    return model.to(dtype).train().requires_grad_(True)


def both(
    task: Wav2Vec2, batch: Batch, model: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(hidden states of valid frames, loss) of each; gradients are in the parameters."""
    index, noise = batch.extra["index"], batch.extra["all_noise"]
    rows, frames = batch.extra["mask"].shape
    picked = noise[torch.arange(rows)[:, None], index]
    features, lengths, _ = task.encoder.extract(batch.audio, batch.audio_lengths)
    with torch.no_grad():
        hidden = task.encoder.contextualise(features, lengths, batch.extra["mask"])
    loss = task(replace(batch, extra=batch.extra | {"noise": picked}))
    loss.total.backward()

    def given(logits: Tensor, tau: float, hard: bool) -> Tensor:
        soft = ((logits + noise.reshape(logits.shape)) / tau).softmax(-1)
        one_hot = F.one_hot(soft.argmax(-1), soft.shape[-1]).to(soft.dtype)
        return one_hot + (soft - soft.detach())

    if dtype == torch.float64:  # Hugging Face casts to fp32 in places; fp64 is to stay
        monkeypatch.setattr(Tensor, "float", lambda self: self.double())
    monkeypatch.setattr(F, "gumbel_softmax", given)
    chosen = index[torch.arange(rows)[:, None, None], batch.extra["negatives"].long()]
    negatives = torch.zeros(rows, frames, task.negatives, dtype=torch.int64)
    negatives[torch.arange(rows)[:, None], index] = chosen + frames * torch.arange(rows)[:, None, None]
    ragged = bool((batch.audio_lengths < batch.audio.shape[1]).any())
    seen = (torch.arange(batch.audio.shape[1]) < batch.audio_lengths[:, None]).long() if ragged else None
    model.set_gumbel_temperature(task.temperature[0])
    kept: list[Tensor] = []
    handle = model.wav2vec2.register_forward_hook(lambda *a: kept.append(a[2].last_hidden_state.detach()))
    out = model(
        batch.audio,
        attention_mask=seen,
        mask_time_indices=batch.extra["mask"],
        sampled_negative_indices=negatives,
    )
    handle.remove()
    out.loss.backward()
    monkeypatch.undo()
    valid = torch.arange(frames) < lengths[:, None]
    return (hidden[valid], loss.total.detach()), (kept[0][valid], out.loss.detach())


def check(
    encoder: dict[str, Any],
    model: dict[str, Any],
    lengths: list[int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = make(encoder, model, dtype)
    pretrained = describe(task, task.state_dict())
    theirs = hf_model(pretrained, dtype)
    batch = make_batch(task, lengths, dtype)
    ours, other = both(task, batch, theirs, dtype, monkeypatch)
    hidden = float((ours[0] - other[0]).abs().max())
    loss = float((ours[1] - other[1]).abs() / other[1].abs())
    gradients = export_tensors({n: p.grad for n, p in task.named_parameters()}, wav2vec2_hf.huggingface_name)
    expected = wav2vec2_hf._normalise_names({n: p.grad for n, p in theirs.named_parameters()})
    width = pretrained.encoder["width"]
    assert width == pretrained.encoder["conv_layers"][-1][0] or gradients.keys() == expected.keys()
    worst, name = 0.0, ""
    # a key's bias shifts all scores of a query alike, so its gradient is 0 but for rounding: small
    # gradients are measured against the largest
    largest = max(float(value.norm()) for value in expected.values())
    for key, value in gradients.items():
        scale = max(float(expected[key].norm()), 1e-4 * largest)
        error = float((value - expected[key]).norm()) / scale
        worst, name = max((worst, name), (error, key))
    print(f"hidden {hidden:.1e}, loss {loss:.1e}, gradients {worst:.1e} ({name})")
    assert hidden <= 1e-5
    assert loss <= 1e-5
    assert worst <= 1e-4


CODES = {"final_width": 24, "codes": 32, "code_width": 16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("kind", ["group", "layer"])
def test_small(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    check(SMALL | (LARGE if kind == "layer" else {}), CODES, [16000, 16000], dtype, monkeypatch)


@pytest.mark.parametrize("kind", ["group", "layer"])
def test_padded_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(SMALL | (LARGE if kind == "layer" else {}), CODES, [16000, 11000], torch.float64, monkeypatch)


@pytest.mark.slow
def test_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every width and kernel of the base model. Two of its twelve layers, which are alike, suffice."""
    check({"layers": 2}, {}, [8000, 8000], torch.float32, monkeypatch)
