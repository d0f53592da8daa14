"""RNN-T: an encoder, a prediction network and an additive joint (Graves, 2012; MLPerf RNN-T).

Legend: B rows, T encoder frames, U labels, H joint width, V classes (blank last).
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from speechtrain.batch import Batch, Footprint
from speechtrain.compute_policy import PLAIN, apply_policy
from speechtrain.decoding.base import Hypothesis, TransducerScorer
from speechtrain.encoders.base import Encoder
from speechtrain.losses.ctc import ctc_loss
from speechtrain.losses.transducer import transducer_loss
from speechtrain.models.recogniser import Recogniser
from speechtrain.nn.joint import Joint
from speechtrain.nn.lstm import EndSegment
from speechtrain.nn.prediction import LSTMPrediction, Prediction
from speechtrain.task import Sums
from speechtrain.text.vocabulary import Tokenizer


class RNNT(Recogniser):
    """RNN-T recognition, trained by the exact transducer loss.

    ``ctc_weight`` adds a CTC loss on the encoder; ``fastemit`` is the lambda of Yu et al. (2021). A joint
    with durations makes it a TDT (Xu et al., 2023), whose logit under-normalisation is ``sigma``.
    ``joint_rows`` above 0 computes joint and loss for so many rows at a time, cut to their longest (where
    shapes are static, only the rows are cut): their memory is that of so many rows. Dropout draws a mask for
    each such slice.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        encoder: Encoder,
        prediction: Prediction | None = None,
        joint: Joint | None = None,
        ctc_weight: float = 0.0,
        fastemit: float = 0.0,
        freeze_encoder_steps: float = 0,
        encoder_lr_scale: float = 1.0,
        joint_rows: int = 0,
        sigma: float = 0.0,
    ) -> None:
        for name, value in {"fastemit": fastemit, "joint_rows": joint_rows}.items():
            if value < 0:
                raise ValueError(f"{name}={value}: it must be at least 0")
        super().__init__(tokenizer, encoder, freeze_encoder_steps, encoder_lr_scale)
        self.prediction = prediction or LSTMPrediction()
        self.prediction.connect(tokenizer.size - 1)
        self.joint = joint or Joint()
        if sigma < 0 or (sigma and not self.joint.durations):
            raise ValueError(f"sigma={sigma}: it must be at least 0, and 0 without joint.durations")
        if fastemit and self.joint.durations:
            raise ValueError(f"fastemit={fastemit}: it must be 0 with joint.durations")
        self.beam = "" if self.joint.durations else "beam"
        self.joint.connect(encoder.width, self.prediction.width, tokenizer.size)
        self.ctc_weight = ctc_weight
        self.ctc = nn.Linear(encoder.width, tokenizer.size) if ctc_weight > 0 else None
        self.fastemit, self.joint_rows, self.sigma = fastemit, joint_rows, sigma

    def losses(self, encoded: Tensor, lengths: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        policy, blank = self.policy, self.tokenizer.blank
        sides = self.joint.encoder(encoded), self.joint.prediction(self.prediction(batch.labels))
        if policy.lstm_segment:  # the loss is a graph of its own
            sides = EndSegment.apply(policy.mark_step, *sides)  # type: ignore[no-untyped-call]
        given = (*sides, batch.labels, lengths, batch.label_lengths)
        if self.joint_rows:
            slices = zip(*(value.split(self.joint_rows) for value in given), strict=True)
            transducer = torch.cat([self._transducer(*self._cut(*rows)) for rows in slices])
        else:
            transducer = self._transducer(*given)
        if self.ctc is None:
            return transducer, {}
        scores = self.ctc(encoded).float().log_softmax(-1)
        symbols = batch.label_lengths
        ctc = ctc_loss(scores, batch.labels, lengths, symbols=symbols, blank=blank, policy=policy)
        count = batch.weight.sum()
        parts: Sums = {
            "loss_transducer": ((transducer.detach() * batch.weight).sum(), count),
            "loss_ctc": ((ctc.detach() * batch.weight).sum(), count),
        }
        return transducer + self.ctc_weight * ctc, parts

    def _cut(
        self, encoder: Tensor, prediction: Tensor, labels: Tensor, *lengths: Tensor
    ) -> tuple[Tensor, ...]:
        """Cut the padding that no row of a slice needs."""
        if self.policy.static_shapes:
            return encoder, prediction, labels, *lengths
        frames, symbols = (int(length.max()) for length in lengths)
        return encoder[:, : max(1, frames)], prediction[:, : symbols + 1], labels[:, :symbols], *lengths

    def _transducer(
        self, encoder: Tensor, prediction: Tensor, labels: Tensor, frames: Tensor, symbols: Tensor
    ) -> Tensor:
        policy, joint = self.policy, self.joint
        return transducer_loss(
            encoder,
            prediction,
            weight=joint.output.weight,
            bias=joint.output.bias,
            labels=labels,
            encoder_lengths=frames,
            label_lengths=symbols,
            blank=self.tokenizer.blank,
            dropout=joint.dropout if self.training else 0.0,
            # drawn from the generator that the trainer seeds for each micro-batch
            seed=int(torch.randint(2**62, ())),
            fastemit=self.fastemit,
            durations=joint.durations,
            sigma=self.sigma,
            static=policy.transducer == "static",
            compute_dtype=policy.product_dtype,
            chunk=policy.lattice_cells,
            keep=policy.logit_bytes,
        )

    def hypotheses(self, encoded: Tensor, lengths: Tensor) -> list[Hypothesis]:
        prediction, joint = self.prediction, self.joint
        frames = joint.encoder(encoded)
        if self.policy.static_shapes:
            # the number of search steps depends on data: the host decodes, and reads all once per batch
            prediction, joint = copy.deepcopy((prediction, joint))
            for part in (prediction, joint):
                apply_policy(part.cpu(), PLAIN)
            frames, lengths = frames.cpu(), lengths.cpu()
        scorer = TransducerScorer(self.tokenizer, self.frame_seconds, prediction=prediction, joint=joint)
        return self.decoder.decode(scorer, frames, lengths)

    def footprint(self) -> Footprint:
        """The encoder's memory, and the recursion of the loss: about 200 bytes per lattice cell.

        With durations, each arc of a cell has about 60, two for each frame up to the longest.
        """
        of_arcs = 120 * (self.joint.durations[-1] + 1) if self.joint.durations else 0
        return Footprint(self.encoder.activation_bytes(), (200 + of_arcs) / self.frame_seconds)
