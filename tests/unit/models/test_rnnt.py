"""The RNN-T of every size: golden parameter counts, initialisation, padding, and its greedy decoder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import PLAIN, STATIC, ComputePolicy, apply_policy
from speechtrain.decoding.greedy import Greedy
from speechtrain.errors import ConfigError
from speechtrain.models.rnnt import RNNT
from speechtrain.start.run_config import part_of
from speechtrain.text.vocabulary import Characters, Tokenizer
from tests.support import noise
from tests.support.composed import composed


class Pieces(Tokenizer):
    """1023 subwords without a SentencePiece model, to count parameters."""

    labels = [f"<{index}>" for index in range(1023)]  # noqa: RUF012

    size = 1024
    blank = 1023

    def normalise(self, text: str) -> str:
        return text

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def unknown(self, text: str) -> set[str]:
        return set()

    def state(self) -> dict[str, Any]:
        return {}


def built(*overrides: str, tokenizer: Tokenizer | None = None) -> RNNT:
    config = composed(*overrides)
    tokenizer = tokenizer or Characters()
    torch.manual_seed(1)
    encoder = part_of(config, "encoder").build(augment=part_of(config, "augment").build())
    model: RNNT = part_of(config, "model").build(tokenizer=tokenizer, encoder=encoder)
    return model


def count(model: RNNT) -> int:
    return sum(p.numel() for p in model.parameters())


# AIDK's logged run: 256 features, StackTime 8, 2+2 layers of 1024, no norms
WIDE = [
    "model=rnnt_mlperf",
    "encoder.features.pad_features_to=32",
    "encoder.stack_time=8",
    "encoder.post_layers=2",
]
NO_NORMS = ["encoder.feature_norm=false", "encoder.layer_norm=false", "model.prediction.layer_norm=false"]


@pytest.mark.parametrize(
    ("overrides", "tokenizer", "parameters"),
    [
        (["model=rnnt_mlperf"], Pieces(), 49_006_080),
        (["model=rnnt_intel"], Characters(), 47_985_693),
        (["model=rnnt_aidk"], Pieces(), 21_001_216),
        (["model=rnnt_aidk", *NO_NORMS], Pieces(), 20_997_632),
        (WIDE, Pieces(), 65_840_640),
    ],
)
def test_golden_parameter_counts(overrides: list[str], tokenizer: Tokenizer, parameters: int) -> None:
    with torch.device("meta"):  # counting needs no numbers
        assert count(built(*overrides, tokenizer=tokenizer)) == parameters


def test_initialisation_of_the_forget_gates() -> None:
    model = built("model=rnnt_mlperf", "encoder.hidden=16")
    for layer in range(2):
        lstm = model.encoder.pre_rnn.lstm  # type: ignore[union-attr]
        assert torch.equal(getattr(lstm, f"bias_ih_l{layer}")[16:32], torch.full((16,), 0.5))
        assert torch.equal(getattr(lstm, f"bias_hh_l{layer}")[16:32], torch.zeros(16))
        bound = 0.5 / 4  # uniform(±1/sqrt(16)) times the initial scale
        assert 0.9 * bound < getattr(lstm, f"weight_hh_l{layer}").abs().max() <= bound


def test_a_rows_loss_does_not_depend_on_its_batch() -> None:
    model = built("model=rnnt_small").eval()
    both = noise.batch(16000, 9600, labels=[[1, 2, 3, 4], [5, 6]])
    alone = replace(noise.batch(9600, labels=[[5, 6]]), audio=both.audio[1:, :9600], keys=both.keys[1:])
    second = replace(both, weight=torch.tensor([0.0, 1.0]))
    with torch.no_grad():
        torch.testing.assert_close(model(second).total, model(alone).total, rtol=1e-4, atol=1e-4)


def test_filler_rows_neither_count_nor_poison() -> None:
    model = built("model=rnnt_small").train()
    batch = replace(noise.batch(12800, 12800, labels=[[1, 2], []]), weight=torch.tensor([1.0, 0.0]))
    batch.audio[1] = 0.0
    loss = model(model.prepare(batch, 1))
    loss.total.backward()
    assert float(loss.weight) == 1.0
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def losses_and_gradients(model: RNNT, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(3)
    model.train()
    total = model(model.prepare(batch, 1)).total
    total.backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def masked_losses(model: RNNT, batch: Batch, generator_seed: int, seed: int) -> Tensor:
    encoded, lengths = model.encoder.encode(batch)
    torch.manual_seed(generator_seed)
    losses, _ = model.losses(encoded, lengths, model.prepare(batch, seed))
    return losses.detach()


def test_rnnt_joint_dropout_depends_on_the_address_alone() -> None:
    """Whatever the host's generator has drawn. A slice of the rows and another seed have other masks."""
    small = ["model.joint.dropout=0.5", "encoder.dropout=0", "augment=none", "model.joint_rows=1"]
    model = built("model=rnnt_small", *small, "encoder.features.dither=0").train()
    model.prediction.eval()
    batch = noise.batch(16000, 16000, labels=[[1, 2, 3], [1, 2, 3]])
    batch.audio[1] = batch.audio[0]
    losses = masked_losses(model, batch, 1, seed=7)
    assert torch.equal(losses, masked_losses(model, batch, 2, seed=7))
    assert not torch.equal(losses, masked_losses(model, batch, 1, seed=8))
    assert losses[0] != losses[1]
    seeds = [model.train(mode).prepare(batch, 7).extra["joint_seeds"] for mode in (True, False)]
    assert torch.equal(*seeds)  # A batch may be prepared before ``train()``.


@pytest.mark.parametrize("policy", [PLAIN, replace(STATIC, spectrum="fft")])
@pytest.mark.parametrize("rows", [1, 2, 3, 100])
def test_the_joint_by_rows_has_the_gradient_of_all(rows: int, policy: ComputePolicy) -> None:
    batch = noise.batch(16000, 4800, 11200, 19200, 8000, labels=[[1, 2, 3], [4], [], [1] * 9, [5, 6]])
    batch = replace(batch, weight=torch.tensor([1.0, 1, 1, 1, 0]))
    small = ["model.joint.dropout=0", "encoder.dropout=0", "augment=none", "model.ctc_weight=0.3"]
    small += ["encoder.hidden=16", "model.prediction.hidden=8", "model.joint.hidden=8"]
    found = []
    for joint_rows in (0, rows):
        model = built("model=rnnt_small", *small, f"model.joint_rows={joint_rows}")
        apply_policy(model, policy)
        model.prediction.eval()
        found.append(losses_and_gradients(model, batch))
    (loss, wanted), (split, gradients) = found
    torch.testing.assert_close(split, loss, rtol=1e-6, atol=0)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        largest = float(wanted[name].abs().max())
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-5 * largest + 1e-12)


def test_the_joint_of_all_rows_draws_the_mask_of_parts() -> None:
    batch = noise.batch(8000, 6400, labels=[[1, 2, 3], [4]])
    whole, one = (
        losses_and_gradients(built("model=rnnt_small", f"model.joint_rows={n}"), batch)[0] for n in (0, 2)
    )
    assert torch.equal(whole, one)


def one_at_a_time(model: RNNT, encoded: Tensor, length: int, limit: int) -> list[int]:
    """The reference decoder of MLPerf, written again: one utterance, plain loops."""
    labels: list[int] = []
    output, state = model.prediction.start(1)
    for t in range(length):
        if len(labels) > limit:
            break
        for _ in range(model.decoder.max_symbols_per_step):  # type: ignore[attr-defined]
            hidden = torch.relu(model.joint.encoder(encoded[t]) + model.joint.prediction(output[0]))
            label = int(model.joint.output(hidden).argmax())
            if label == model.tokenizer.blank:
                break
            labels.append(label)
            output, state = model.prediction.step(torch.tensor([label]), state)
    return labels


@pytest.mark.parametrize("limits", [(30, 300), (2, None), (30, None), (30, 5), (1, 3)])
def test_greedy_decoding_equals_one_utterance_at_a_time(limits: tuple[int, int | None]) -> None:
    model = built("model=rnnt_small", tokenizer=Pieces()).eval()
    model.decoder = Greedy(*limits)
    with torch.no_grad():
        model.joint.output.weight *= 6.0  # far from the uniform, so that labels and blanks alternate
        model.joint.output.bias[model.tokenizer.blank] += 6.0
        batch = noise.batch(22400, 4800, 14400, 960)
        encoded, lengths = model.encoder(batch)
        together = [found.text for found in model.transcribe(batch, model.decoder)]
        separately = []
        for row, length in enumerate(lengths.tolist()):
            limit = limits[1] or math.ceil(length * 50 * 0.06)  # 50 labels a second, 60 ms a frame
            labels = one_at_a_time(model, encoded[row], length, limit)
            separately.append(model.tokenizer.decode(labels))
    assert together == separately
    assert sum(len(text.split()) for text in together) > 0


def test_evaluation_reports_corpus_sums() -> None:
    model = built("model=rnnt_small").eval()
    batch = noise.batch(8000, 8000, labels=[[1, 2], [3]])
    batch = replace(batch, weight=torch.tensor([1.0, 0.0]), ids=("a", ""), texts=("one two", ""))
    with torch.no_grad():
        result = model.evaluate(batch, model.decoder)
    assert [example.id for example in result.examples] == ["a"]
    assert float(result.metrics["wer"][1]) == 2.0
    assert float(result.metrics["cer"][1]) == 7.0
    assert float(result.metrics["loss"][1]) == 1.0


def test_delay_penalty_is_in_the_loss_of_training_only() -> None:
    """Two utterances of one label. The loss of a penalised label lies within lambda times half the frames."""
    without_dropout = "model.joint.dropout=0", "model.prediction.dropout=0"
    model = built("model=rnnt_small", *without_dropout, "model.delay_penalty=0.1")
    batch = noise.batch(19200, 12800, labels=[[1], [2]])
    encoded, lengths = model.eval().encoder.encode(batch)
    evaluation, _ = model.losses(encoded, lengths, batch)
    training, _ = model.train().losses(encoded, lengths, batch)
    model.delay_penalty = 0.0
    plain, _ = model.losses(encoded, lengths, batch)
    assert torch.equal(evaluation, plain)
    difference = (training - plain).abs()
    assert (difference > 0).all()
    assert (difference < 0.1 * (lengths - 1) / 2).all()


TDT = "model.joint.durations=[0,1,2,3,4]"


@pytest.mark.parametrize("prediction", ["lstm", "stateless"])
def test_a_tdt_learns_and_skips_frames(prediction: str) -> None:
    """A few updates on one utterance halve the loss; sigma and durations arrive at the loss."""
    model = built("model=rnnt_small", f"prediction={prediction}", TDT, "model.sigma=0.05").eval()
    assert model.joint.output.out_features == model.tokenizer.size + 5
    batch = noise.batch(19200, 12800, labels=[[1, 2, 3, 4], [5, 6]])
    encoded, lengths = model.encoder.encode(batch)
    loss, _ = model.losses(encoded, lengths, batch)
    model.sigma = 0.0
    without, _ = model.losses(encoded, lengths, batch)
    assert (loss > without).all()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(25):
        optimizer.zero_grad()
        total = model(batch).total
        total.backward()
        optimizer.step()
    assert float(total.detach()) < 0.5 * float(without.detach().sum())
    found = model.transcribe(batch, model.decoder)
    assert len(found) == 2
    assert all(isinstance(one.text, str) for one in found)


def test_each_slice_of_two_views_has_a_seed_of_its_own() -> None:
    small = ["encoder=fastconformer_tiny", "encoder.layers=1", "model.joint.dropout=0.3"]
    model = built("model=rnnt", *small, "model.ctc_weight=0.3", "model.consistency=0.2", "model.joint_rows=1")
    batch = model.prepare(noise.batch(16_000, 12_000), 5)
    assert len(set(map(tuple, batch.extra["joint_seeds"].tolist()))) == 4
    loss = model(batch)
    assert loss.weight.item() == 2
    assert torch.isfinite(loss.total)
    with pytest.raises(ConfigError, match="consistency needs the CTC loss"):
        built("model=rnnt", *small, "model.ctc_weight=0", "model.consistency=0.2")


def test_training_adds_the_ctc_loss_of_the_middle_layer() -> None:
    """The frames of the third of five layers, scored by the same linear layer and torch's CTC."""
    small = ["encoder=fastconformer_tiny", "encoder.width=16", "encoder.heads=2", "augment=none"]
    small += ["encoder.dropout=0", "encoder.residual_dropout=0", "model.joint.dropout=0"]
    small += ["model.ctc_weight=0.7"]
    model = built("model=rnnt", *small, "encoder.middle_ctc=0.3")
    without = built("model=rnnt", *small)
    without.load_state_dict(model.state_dict())
    batch = noise.batch(16_000, 12_000)
    frames: list[torch.Tensor] = []
    model.encoder.layers[2].register_forward_hook(lambda layer, given, output: frames.append(output))
    torch.manual_seed(1)
    loss = model(batch)
    torch.manual_seed(1)
    plain = without(batch)
    middle = torch.nn.functional.ctc_loss(
        model.ctc(frames[0]).log_softmax(-1).transpose(0, 1),
        batch.labels,
        torch.tensor([model.encoder.frames(length) for length in batch.audio_lengths.tolist()]),
        batch.label_lengths,
        blank=model.tokenizer.blank,
        reduction="none",
    )
    torch.testing.assert_close(loss.total - plain.total, 0.3 * middle.sum())
    torch.testing.assert_close(loss.metrics["loss_middle_ctc"][0], middle.sum())
    loss.total.backward()
    assert all(parameter.grad is not None for parameter in model.encoder.layers.parameters())
    model.eval()
    without.eval()
    torch.testing.assert_close(model(batch).total, without(batch).total)
    with pytest.raises(ConfigError, match=r"encoder\.middle_ctc needs the CTC loss"):
        built("model=rnnt", *small, "encoder.middle_ctc=0.3", "model.ctc_weight=0")
