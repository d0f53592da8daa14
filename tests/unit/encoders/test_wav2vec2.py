from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import PLAIN, STATIC, ComputePolicy, apply_policy
from speechtrain.encoders.wav2vec2 import Wav2Vec2Encoder
from speechtrain.features.augment import Augment
from speechtrain.nn.masking import SpanMask

THIN = [[32, 10, 5], *[[32, 3, 2]] * 4, *[[32, 2, 2]] * 2]
SIZES = {"width": 48, "layers": 3, "feed_forward": 96, "heads": 4}
CALM = {"dropout": 0.0, "attention_dropout": 0.0, "input_dropout": 0.0, "layer_drop": 0.0}
LARGE = {
    "conv_bias": True,
    "conv_norm": "layer",
    "width": 1024,
    "layers": 24,
    "feed_forward": 4096,
    "heads": 16,
    "pre_norm": True,
}


def make(policy: ComputePolicy = PLAIN, **values: object) -> Wav2Vec2Encoder:
    torch.manual_seed(0)
    encoder = Wav2Vec2Encoder(**({"conv_layers": THIN} | SIZES | values))  # type: ignore[arg-type]
    apply_policy(encoder, policy)
    return encoder


def make_batch(*lengths: int) -> Batch:
    torch.manual_seed(1)
    audio = torch.randn(len(lengths), max(lengths)) * 0.3
    samples = torch.tensor(lengths)
    rows = len(lengths)
    return Batch(
        audio=audio * (torch.arange(max(lengths)) < samples[:, None]),
        audio_lengths=samples,
        labels=torch.zeros(rows, 0, dtype=torch.int64),
        label_lengths=torch.zeros(rows, dtype=torch.int64),
        weight=torch.ones(rows),
        keys=torch.arange(rows),
        ids=tuple("abcdef"[:rows]),
        texts=("",) * rows,
    )


# --- parameters -----------------------------------------------------------------------------------


def beside_the_encoder(width: int, codes: int, final: int) -> int:
    """Parameters of quantizer, project_q and final_proj (reference shapes): 2 × 320 entries."""
    quantizer = 640 * (codes // 2) + 640 * 512 + 640
    return quantizer + codes * final + final + width * final + final


@pytest.mark.parametrize(
    ("values", "codes", "total"), [({}, 256, 95_044_608), (LARGE, 768, 317_390_592)], ids=["base", "large"]
)
def test_golden_parameter_counts(values: dict[str, object], codes: int, total: int) -> None:
    with torch.device("meta"):
        encoder = Wav2Vec2Encoder(**values)  # type: ignore[arg-type]
    count = sum(p.numel() for p in encoder.parameters())
    assert count + beside_the_encoder(encoder.width, codes, codes) == total


def expected_shapes(width: int, feed_forward: int, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "mask_embedding", (width,)
    yield "norm.weight", (512,)
    yield "norm.bias", (512,)
    yield "projection.weight", (width, 512)
    yield "projection.bias", (width,)
    yield "transformer.position.weight_g", (1, 1, 128)
    yield "transformer.position.weight_v", (width, width // 16, 128)
    yield "transformer.position.bias", (width,)
    yield "transformer.norm.weight", (width,)
    yield "transformer.norm.bias", (width,)
    for i in range(layers):
        layer = f"transformer.layers.{i}"
        for part in ("query", "key", "value", "output"):
            yield f"{layer}.attention.{part}.weight", (width, width)
            yield f"{layer}.attention.{part}.bias", (width,)
        for part in ("attention_norm", "norm"):
            yield f"{layer}.{part}.weight", (width,)
            yield f"{layer}.{part}.bias", (width,)
        yield f"{layer}.feed_forward_in.weight", (feed_forward, width)
        yield f"{layer}.feed_forward_in.bias", (feed_forward,)
        yield f"{layer}.feed_forward_out.weight", (width, feed_forward)
        yield f"{layer}.feed_forward_out.bias", (width,)


@pytest.mark.parametrize("values", [{}, LARGE], ids=["base", "large"])
def test_names_and_shapes(values: dict[str, object]) -> None:
    with torch.device("meta"):
        encoder = Wav2Vec2Encoder(**values)  # type: ignore[arg-type]
    state = {name: tuple(value.shape) for name, value in encoder.state_dict().items()}
    own = {name: shape for name, shape in state.items() if not name.startswith("extractor.")}
    wide = encoder.transformer.layers[0].feed_forward_in.out_features
    assert own == dict(expected_shapes(encoder.width, wide, len(encoder.transformer.layers)))


def test_no_projection_where_the_widths_agree() -> None:
    encoder = make(width=32)
    assert not [name for name in encoder.state_dict() if name.startswith("projection")]
    assert encoder(make_batch(2000))[0].shape == (1, 6, 32)


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
    batch = make_batch(9000, 6000)
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
        batch = make_batch(3000, 2000)
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
    batch = make_batch(16000, 9000, 5000)
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
    drawn = encoder.prepare(make_batch(16000, 1200), 3).extra["mask"]
    assert drawn[1].sum() <= encoder.frames(1200)


def test_masks_are_used_in_training_and_not_in_evaluation() -> None:
    encoder = make(mask=SpanMask(0.5, 4), **CALM)
    batch = make_batch(16000, 9000)
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
        return encoder.draw_keep()

    kept = torch.stack([keep(seed) for seed in range(2000)])
    assert set(kept.unique().tolist()) == {0.0, 1.0}
    assert ((kept.mean(0) - 0.7).abs() < 0.04).all()
    assert abs(float((kept[:, 0] * kept[:, 1]).mean()) - 0.49) < 0.04  # independent of one another
    assert torch.equal(keep(5), keep(5))
    assert make(layer_drop=0.0).draw_keep().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("mask", [None, SpanMask(0.5, 4)])
@pytest.mark.parametrize("norm", ["group", "layer"])
def test_every_parameter_has_a_gradient(mask: SpanMask | None, norm: str) -> None:
    encoder = make(mask=mask, layer_drop=0.6, conv_norm=norm)
    batch = encoder.prepare(make_batch(9000, 6000), 2)
    assert 0.0 in batch.extra["keep"]
    encoder(batch)[0].square().sum().backward()
    assert not [name for name, p in encoder.named_parameters() if p.grad is None]


def test_padding_independence_with_layer_norm() -> None:
    encoder = make(conv_norm="layer").eval()
    batch = make_batch(9000, 6000)
    y, lengths = encoder(batch)
    alone = encoder(make_one(batch, 1, 6000))[0]
    frames = int(lengths[1])
    torch.testing.assert_close(y[1, :frames], alone[0], atol=1e-5, rtol=1e-5)


def make_one(batch: Batch, row: int, samples: int) -> Batch:
    whole = make_batch(samples)
    return Batch(**(vars(whole) | {"audio": batch.audio[row : row + 1, :samples]}))


def test_noise_is_added_to_the_waveform_in_training() -> None:
    encoder = make(augment=Augment(noise_db=[5.0, 10.0]), **CALM)
    batch = make_batch(4000)
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
    weights = {p.untyped_storage().data_ptr() for p in encoder.parameters()}
    stored: dict[int, tuple[int, Tensor]] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            stored[storage.data_ptr()] = (storage.nbytes(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        encoder(make_batch(16000 * 10))
    measured = sum(size for size, _ in stored.values()) / 10
    assert 0.5 < encoder.activation_bytes() / measured < 2.0


def test_no_operation_depends_on_the_data() -> None:
    """The whole step runs on the meta device, which has shapes and no values to read or to index by."""
    policy = ComputePolicy(conv="conv1d", attention="slices")
    encoder = make(policy, mask=SpanMask(0.5, 4), layer_drop=0.5)
    batch = encoder.prepare(make_batch(9000, 6000), 2)
    meta = encoder.to("meta")
    y, lengths = meta(batch.to(lambda x: x.to("meta")))
    assert y.shape == (2, meta.frames(9000), 48)
    y.sum().backward()
    assert lengths.shape == (2,)


def test_true_base_shape() -> None:
    torch.manual_seed(0)
    encoder = Wav2Vec2Encoder().eval()
    with torch.no_grad():
        y, lengths = encoder(make_batch(16000))
    assert y.shape == (1, 49, 768)
    assert lengths.tolist() == [49]
    assert y.isfinite().all()


def test_static_forms_change_nothing_but_rounding() -> None:
    encoder = make(mask=SpanMask(0.5, 4), **CALM)
    batch = encoder.prepare(make_batch(9000, 6000), 2)
    plain = encoder(batch)[0]
    apply_policy(encoder, STATIC)
    assert encoder.state_dict().keys() == make().state_dict().keys()
    written = encoder(batch)[0]
    assert not any(layer.attention.fused for layer in encoder.transformer.layers)
    torch.testing.assert_close(written[0], plain[0], atol=1e-5, rtol=1e-5)
