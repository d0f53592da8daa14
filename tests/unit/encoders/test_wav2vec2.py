from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from speechtrain.compute_policy import PLAIN, ComputePolicy, apply_policy
from speechtrain.encoders.wav2vec2 import Wav2Vec2Encoder
from speechtrain.features.augment import Augment
from speechtrain.nn.masking import SpanMask
from tests.support import noise
from tests.support.stored import stored_bytes

THIN = [[32, 10, 5], *[[32, 3, 2]] * 4, *[[32, 2, 2]] * 2]
SIZES = {"width": 48, "layers": 3, "feed_forward": 96, "heads": 4}
CALM = {"dropout": 0.0, "attention_dropout": 0.0, "input_dropout": 0.0, "layer_drop": 0.0}


def make(policy: ComputePolicy = PLAIN, **values: object) -> Wav2Vec2Encoder:
    torch.manual_seed(0)
    encoder = Wav2Vec2Encoder(**({"conv_layers": THIN} | SIZES | values))  # type: ignore[arg-type]
    apply_policy(encoder, policy)
    return encoder


# --- parameters -----------------------------------------------------------------------------------


def test_no_projection_where_the_widths_agree() -> None:
    encoder = make(width=32)
    assert not [name for name in encoder.state_dict() if name.startswith("projection")]
    assert encoder(noise.batch(2000))[0].shape == (1, 6, 32)


def test_initial_mask_embedding_is_uniform() -> None:
    embedding = make(width=512).mask_embedding.detach()
    assert 0 <= float(embedding.min()) < 0.02
    assert 0.98 < float(embedding.max()) < 1


# --- against Hugging Face -------------------------------------------------------------------------

NAMES = {
    "masked_spec_embed": "mask_embedding",
    "feature_projection.layer_norm": "norm",
    "feature_projection.projection": "projection",
    "encoder.pos_conv_embed.conv.parametrizations.weight.original0": "transformer.position.weight_g",
    "encoder.pos_conv_embed.conv.parametrizations.weight.original1": "transformer.position.weight_v",
    "encoder.pos_conv_embed.conv": "transformer.position",
    "encoder.layer_norm": "transformer.norm",
    "feature_extractor.conv_layers": "extractor.layers",
    "encoder.layers": "transformer.layers",
    "attention.q_proj": "attention.query",
    "attention.k_proj": "attention.key",
    "attention.v_proj": "attention.value",
    "attention.out_proj": "attention.output",
    "feed_forward.intermediate_dense": "feed_forward_in",
    "feed_forward.output_dense": "feed_forward_out",
    "final_layer_norm": "norm",
}


def renamed(name: str, extractor: bool) -> str:
    for theirs, ours in NAMES.items():
        if extractor and theirs == "final_layer_norm":
            continue
        name = name.replace(theirs, ours)
    if name.startswith("extractor."):
        return name.replace("layer_norm", "norm")
    return name.replace(".layer_norm.", ".attention_norm.")


def hugging_face(ours: Wav2Vec2Encoder, norm: str, bias: bool, pre_norm: bool) -> torch.nn.Module:
    """Their model with random weights, copied into ours."""
    transformers = pytest.importorskip("transformers", reason="the oracle is a development dependency")
    config = transformers.Wav2Vec2Config(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        feat_extract_norm=norm,
        conv_dim=[32] * 7,
        conv_bias=bias,
        do_stable_layer_norm=pre_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=True,
        mask_time_prob=0.05,  # any: without one their model has no mask embedding
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    theirs: torch.nn.Module = transformers.Wav2Vec2Model(config)
    with torch.no_grad():
        for parameter in theirs.parameters():  # zero biases and unit norms would hide a term
            parameter.add_(torch.randn_like(parameter) * 0.05)
    state = {renamed(name, "feature_extractor" in name): v for name, v in theirs.state_dict().items()}
    ours.load_state_dict(state)
    return theirs.train()  # only a training model takes the given mask


@pytest.mark.parametrize("attention", ["sdpa", "slices"])
@pytest.mark.parametrize("pre_norm", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize(("norm", "bias"), [("group", False), ("layer", True)])
def test_hidden_states_and_gradients_of_hugging_face(
    norm: str, bias: bool, pre_norm: bool, attention: str
) -> None:
    """In fp64: in fp32, the rounding of some chips comes to 1e-5 of the largest gradient."""
    policy = ComputePolicy(attention=attention)
    ours = make(policy, conv_norm=norm, conv_bias=bias, pre_norm=pre_norm, gradient_scale=1.0, **CALM)
    theirs = hugging_face(ours, norm, bias, pre_norm).double()
    ours.double()
    batch = noise.batch(9000, 6000)
    batch = replace(batch, audio=batch.audio.double())
    frames = torch.tensor([ours.frames(9000), ours.frames(6000)])
    chosen = torch.rand(2, int(frames[0])) < 0.4
    for padded in (False, True):
        samples = batch.audio_lengths if padded else torch.tensor([9000, 9000])
        attended = (torch.arange(9000) < samples[:, None]).long() if padded else None
        for mask in (None, chosen):
            given = torch.zeros_like(chosen) if mask is None else mask
            expected = theirs(batch.audio, attention_mask=attended, mask_time_indices=given).last_hidden_state
            features, lengths, penalty = ours.extract(batch.audio, samples)
            assert lengths.tolist() == (frames.tolist() if padded else [int(frames[0])] * 2)
            y = ours.contextualise(features, lengths, mask)
            valid = torch.arange(y.shape[1]) < lengths[:, None]
            assert float((y - expected).detach()[valid].abs().max()) < 1e-10
            raw = theirs.feature_extractor(batch.audio)
            torch.testing.assert_close(penalty, raw.square().mean().float())

            cotangent = torch.randn_like(y) * valid[:, :, None]
            theirs.zero_grad()
            ours.zero_grad()
            (expected * cotangent).sum().backward()
            (y * cotangent).sum().backward()
            gradients = dict(ours.named_parameters())
            largest = max(float(p.grad.abs().max()) for p in theirs.parameters() if p.grad is not None)
            for name, parameter in theirs.named_parameters():
                own = gradients[renamed(name, "feature_extractor" in name)].grad
                assert own is not None
                theirs_grad = torch.zeros_like(own) if parameter.grad is None else parameter.grad
                assert float((own - theirs_grad).abs().max()) < 1e-10 * largest, name


# --- the encoder in training ----------------------------------------------------------------------


def test_penalty_is_scaled_like_the_rest_of_the_gradient() -> None:
    gradients = {}
    for scale in (1.0, 0.1):
        encoder = make(gradient_scale=scale)
        batch = noise.batch(3000, 2000)
        features, _, penalty = encoder.extract(batch.audio, batch.audio_lengths)
        assert penalty.dtype == torch.float32
        assert penalty.shape == ()
        penalty.backward()
        gradients[scale] = encoder.extractor.layers[0].conv.weight.grad
        assert features.shape == (2, encoder.frames(3000), 32)
    torch.testing.assert_close(gradients[0.1], gradients[1.0] * 0.1)


def test_masked_frames_and_channels() -> None:
    encoder = make(**CALM)
    seen: list[Tensor] = []
    encoder.transformer.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    features = torch.randn(2, 6, 32)
    lengths = torch.tensor([6, 5])
    mask = torch.tensor([[True, False, False, True, False, False], [False] * 6])
    channels = torch.zeros(2, 48, dtype=torch.bool)
    channels[1, 7:20] = True
    for kind in (torch.bool, torch.float32):
        encoder.contextualise(features, lengths, mask.to(kind), channels.to(kind))
        x = seen.pop()
        plain = encoder.projection(features)
        plain[mask] = encoder.mask_embedding
        plain[1, :, 7:20] = 0.0
        assert torch.equal(x, plain)


def test_prepare_draws_by_address_and_only_in_training() -> None:
    encoder = make(mask=SpanMask(0.5, 4), channel_mask=SpanMask(0.2, 3), layer_drop=0.5)
    batch = noise.batch(16000, 9000, 5000)
    one, again, other = (encoder.prepare(batch, seed).extra for seed in (3, 3, 4))
    assert one.keys() == {"mask", "channel_mask", "keep"}
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["mask"], other["mask"])
    assert not torch.equal(one["channel_mask"], other["channel_mask"])
    assert torch.equal(one["keep"], other["keep"]), "the layers are those of the update"
    assert one["mask"].shape == (3, encoder.frames(16000))
    assert one["mask"].dtype == torch.bool
    assert one["channel_mask"].shape == (3, 48)
    assert one["keep"].shape == (3,)
    for row, samples in enumerate(batch.audio_lengths.tolist()):
        assert one["mask"][row].any()
        assert not one["mask"][row, encoder.frames(samples) :].any()
    assert len({int(n) for n in one["mask"].sum(1)}) > 1  # rows are independent
    assert encoder.eval().prepare(batch, 3) is batch
    assert not make(layer_drop=0.0).prepare(batch, 3).extra


def test_a_row_too_short_for_spans_ends_no_run() -> None:
    encoder = make(mask=SpanMask(0.65, 10))
    drawn = encoder.prepare(noise.batch(16000, 1200), 3).extra["mask"]
    assert drawn[1].sum() <= encoder.frames(1200)


def test_masks_are_used_in_training_and_not_in_evaluation() -> None:
    encoder = make(mask=SpanMask(0.5, 4), **CALM)
    batch = noise.batch(16000, 9000)
    drawn = encoder.prepare(batch, 3)
    assert not torch.equal(encoder(drawn)[0], encoder(batch)[0])
    features, lengths, _ = encoder.extract(batch.audio, batch.audio_lengths)
    expected = encoder.contextualise(features, lengths, drawn.extra["mask"])
    y, found = encoder(drawn)
    torch.testing.assert_close(y, expected)
    assert found.tolist() == [encoder.frames(16000), encoder.frames(9000)]
    encoder.eval()
    assert torch.equal(encoder(drawn)[0], encoder(batch)[0])


def test_layers_are_dropped_at_their_rate() -> None:
    encoder = make(layers=2, layer_drop=0.3)

    def keep(seed: int) -> torch.Tensor:
        encoder.advance(10, seed)
        return encoder.sample_keep()

    kept = torch.stack([keep(seed) for seed in range(2000)])
    assert set(kept.unique().tolist()) == {0.0, 1.0}
    assert ((kept.mean(0) - 0.7).abs() < 0.04).all()
    assert abs(float((kept[:, 0] * kept[:, 1]).mean()) - 0.49) < 0.04  # independent of one another
    assert torch.equal(keep(5), keep(5))
    assert make(layer_drop=0.0).sample_keep().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("mask", [None, SpanMask(0.5, 4)])
@pytest.mark.parametrize("norm", ["group", "layer"])
def test_every_parameter_has_a_gradient(mask: SpanMask | None, norm: str) -> None:
    encoder = make(mask=mask, layer_drop=0.6, conv_norm=norm)
    batch = encoder.prepare(noise.batch(9000, 6000), 2)
    assert 0.0 in batch.extra["keep"]
    encoder(batch)[0].square().sum().backward()
    assert not [name for name, p in encoder.named_parameters() if p.grad is None]


def test_noise_is_added_to_the_waveform_in_training() -> None:
    encoder = make(augment=Augment(noise_db=[5.0, 10.0]), **CALM)
    batch = noise.batch(4000)
    assert not torch.equal(encoder(batch)[0], encoder(batch)[0])
    encoder.eval()
    assert torch.equal(encoder(batch)[0], encoder(batch)[0])


@pytest.mark.parametrize(
    "values",
    [
        {"gradient_scale": 1.0},
        {"gradient_scale": 1.0, "attention_dropout": 0.0},
        {"conv_norm": "layer", "pre_norm": True, **CALM},
        {"width": 96, "layers": 6, "feed_forward": 384},
    ],
)
def test_predicted_activations_are_within_a_factor_of_two(values: dict[str, object]) -> None:
    encoder = make(**({"position_kernel": 8} | values))
    measured = stored_bytes(encoder, noise.batch(160_000))[0] / 10
    assert 0.5 < encoder.activation_bytes() / measured < 2.0
