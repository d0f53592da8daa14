"""RNN-T: an encoder, an LSTM prediction network, an additive joint (Graves, 2012; MLPerf RNN-T).

Legend: B rows, T encoder frames, U labels, H joint width, V classes (blank last).
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechtrain.batch import Batch, Footprint
from speechtrain.compute_policy import ComputePolicy, PolicyAware, apply_policy
from speechtrain.decoding.greedy import greedy
from speechtrain.encoders.base import Encoder
from speechtrain.errors import ConfigError
from speechtrain.losses.ctc import ctc_loss
from speechtrain.losses.transducer import transducer_loss
from speechtrain.metrics import error_rates
from speechtrain.nn.lstm import LSTM, State
from speechtrain.task import Evaluation, Loss, Sums, Task, examples_of
from speechtrain.text.vocabulary import Tokenizer

_Module = TypeVar("_Module", bound=nn.Module)

_LABELS_PER_SECOND = 50  # a limit for a model that emits labels without end


class Prediction(nn.Module):
    """Embedding and LSTM over the previous labels; the sequence starts with a zero vector (no blank row)."""

    def __init__(
        self,
        labels: int,
        embedding: int,
        hidden: int,
        layers: int,
        dropout: float,
        layer_norm: bool,
        forget_gate_bias: float,
        init_scale: float,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(labels, embedding)
        self.dec_rnn = LSTM(embedding, hidden, layers, dropout, layer_norm, forget_gate_bias, init_scale)

    def forward(self, labels: Tensor) -> Tensor:
        """Map labels (B, U) to (B, U+1, hidden); frame u depends on the first u labels."""
        embedded: Tensor = F.pad(self.embed(labels), (0, 0, 1, 0))
        output: Tensor = self.dec_rnn(embedded)[0]
        return output

    def start(self, rows: int) -> tuple[Tensor, State]:
        """Return the output (B, hidden) and the state before the first label."""
        output, state = self.dec_rnn(self.embed.weight.new_zeros(rows, 1, self.embed.embedding_dim))
        return output[:, 0], state

    def step(self, labels: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the output (B, hidden) and the state after one more label per row (B,)."""
        output, state = self.dec_rnn(self.embed(labels)[:, None], state)
        return output[:, 0], state


def _on_host(module: _Module) -> _Module:
    """Copy ``module`` to the host, with the default compute policy."""
    copied = copy.deepcopy(module).cpu()
    apply_policy(copied, ComputePolicy())
    return copied


class RNNT(Task, PolicyAware):
    """RNN-T recognition, trained by the exact transducer loss and evaluated by greedy WER.

    With ``joint_bias`` ``both``, both joint projections have a bias (MLPerf); with ``single``, only the
    encoder's has one, so the additive joint equals Intel's older Linear over the concatenation, its
    weight split in two. ``ctc_weight`` adds a CTC loss on the encoder; ``fastemit`` is the lambda of
    Yu et al. (2021). ``max_symbols`` is the most labels of a hypothesis (MLPerf: 300); None allows 50
    per second of audio, twice the characters of the fastest speech. A pretrained encoder does not change
    for the first ``freeze_encoder_steps`` updates. The loss of a batch is the sum over its utterances,
    and its weight is their number.
    """

    metric = "wer"

    def __init__(
        self,
        tokenizer: Tokenizer,
        encoder: Encoder,
        prediction_embedding: int = 512,
        prediction_hidden: int = 512,
        prediction_layers: int = 2,
        prediction_dropout: float = 0.3,
        prediction_norm: bool = False,
        joint_hidden: int = 512,
        joint_dropout: float = 0.3,
        joint_bias: str = "both",
        forget_gate_bias: float = 1.0,
        init_scale: float = 0.5,
        ctc_weight: float = 0.0,
        fastemit: float = 0.0,
        max_symbols_per_step: int = 30,
        max_symbols: int | None = None,
        freeze_encoder_steps: int = 0,
    ) -> None:
        super().__init__()
        if joint_bias not in ("both", "single"):
            raise ValueError(f"model.joint_bias is {joint_bias!r}; it must be both or single")
        if not 0 <= joint_dropout < 1:
            raise ValueError(f"model.joint_dropout is {joint_dropout}; it must be at least 0 and below 1")
        sizes = {"prediction_embedding": prediction_embedding, "joint_hidden": joint_hidden}
        sizes["max_symbols_per_step"] = max_symbols_per_step
        sizes |= {} if max_symbols is None else {"max_symbols": max_symbols}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"model.{name} is {size}; it must be at least 1")
        if not tokenizer.reads_text:
            raise ConfigError("model=rnnt learns from transcripts; replace tokenizer=none by another one")
        self.tokenizer = tokenizer
        self.blank = tokenizer.blank
        self.encoder = encoder
        self.normalise_audio = encoder.normalise_audio
        self.prediction = Prediction(
            tokenizer.size - 1,
            prediction_embedding,
            prediction_hidden,
            prediction_layers,
            prediction_dropout,
            prediction_norm,
            forget_gate_bias,
            init_scale,
        )
        self.joint_enc = nn.Linear(encoder.width, joint_hidden)
        self.joint_pred = nn.Linear(prediction_hidden, joint_hidden, bias=joint_bias == "both")
        self.joint_net = nn.Linear(joint_hidden, tokenizer.size)
        self.joint_dropout = joint_dropout
        self.ctc_weight = ctc_weight
        self.ctc = nn.Linear(encoder.width, tokenizer.size) if ctc_weight > 0 else None
        self.fastemit = fastemit
        self.max_symbols_per_step = max_symbols_per_step
        self.max_symbols = max_symbols
        self.freeze_encoder_steps = freeze_encoder_steps
        self.skips_parameters = freeze_encoder_steps > 0
        self._policy = ComputePolicy()

    def apply_policy(self, policy: ComputePolicy) -> None:
        self._policy = policy

    def advance(self, step: int, seed: int) -> None:
        self.encoder.frozen = step < self.freeze_encoder_steps
        self.encoder.advance(step, seed)

    def prepare(self, batch: Batch, seed: int) -> Batch:
        return self.encoder.prepare(batch, seed)

    def forward(self, batch: Batch) -> Loss:
        encoded, lengths = self.encoder.encode(batch)
        per_row, parts = self._losses(encoded, lengths, batch)
        return Loss((per_row * batch.weight).sum(), batch.weight.sum(), parts)

    def _losses(self, encoded: Tensor, lengths: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        """Compute the loss of each row (B,) fp32, and its parts where there are several."""
        policy = self._policy
        transducer = transducer_loss(
            self.joint_enc(encoded),
            self.joint_pred(self.prediction(batch.labels)),
            self.joint_net.weight,
            self.joint_net.bias,
            batch.labels,
            lengths,
            batch.label_lengths,
            blank=self.blank,
            dropout=self.joint_dropout if self.training else 0.0,
            # drawn from the generator that the trainer seeds for each micro-batch
            seed=int(torch.randint(2**62, ())),
            fastemit=self.fastemit,
            static=policy.transducer == "static",
            compute_dtype=policy.product_dtype,
            chunk=policy.lattice_cells,
            keep=policy.logit_bytes,
        )
        if self.ctc is None:
            return transducer, {}
        scores = self.ctc(encoded).float().log_softmax(-1)
        is_static = policy.ctc == "static"
        ctc = ctc_loss(scores, batch.labels, lengths, batch.label_lengths, self.blank, static=is_static)
        count = batch.weight.sum()
        parts: Sums = {
            "loss_transducer": ((transducer.detach() * batch.weight).sum(), count),
            "loss_ctc": ((ctc.detach() * batch.weight).sum(), count),
        }
        return transducer + self.ctc_weight * ctc, parts

    def evaluate(self, batch: Batch) -> Evaluation:
        encoded, lengths = self.encoder.encode(batch)
        per_row, _ = self._losses(encoded, lengths, batch)
        examples = examples_of(batch, self._decode(encoded, lengths))
        metrics = error_rates((e.reference, e.hypothesis) for e in examples)
        metrics["loss"] = ((per_row * batch.weight).sum(), batch.weight.sum())
        return Evaluation(metrics, examples)

    def transcribe(self, batch: Batch) -> list[str]:
        return self._decode(*self.encoder.encode(batch))

    def _decode(self, encoded: Tensor, lengths: Tensor) -> list[str]:
        prediction, joint_pred, joint_net = self.prediction, self.joint_pred, self.joint_net
        encoded = self.joint_enc(encoded)
        if self._policy.static_shapes:
            # the number of search steps depends on data, so the host decodes; it reads the frames and these
            # weights once per batch
            prediction = _on_host(prediction)
            joint_pred, joint_net = _on_host(joint_pred), _on_host(joint_net)
            encoded, lengths = encoded.cpu(), lengths.cpu()
        output, state = prediction.start(len(encoded))

        def step(labels: Tensor, state: State) -> tuple[Tensor, State]:
            hidden, state = prediction.step(labels, state)
            return joint_pred(hidden), state

        def select(mask: Tensor, new: State, old: State) -> State:
            rows = mask[None, :, None]  # states are (layers, B, hidden)
            return torch.where(rows, new[0], old[0]), torch.where(rows, new[1], old[1])

        limits = torch.full_like(lengths, self.max_symbols or 0)
        if self.max_symbols is None:
            limits = (lengths * (_LABELS_PER_SECOND / self._frames_per_second())).ceil().long()
        hypotheses = greedy(
            encoded,
            lengths,
            (joint_pred(output), state),
            step,
            lambda f, g: joint_net(F.relu(f + g)),
            select,
            self.blank,
            self.max_symbols_per_step,
            limits,
        )
        return [self.tokenizer.decode(ids) for ids in hypotheses]

    def footprint(self) -> Footprint:
        """The encoder's memory, and the recursion of the loss: about 200 bytes per lattice cell."""
        return Footprint(self.encoder.activation_bytes(), 200 * self._frames_per_second())

    def _frames_per_second(self) -> float:
        return self.encoder.frames(100 * self.encoder.sample_rate) / 100
