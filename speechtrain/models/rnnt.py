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

    ``ctc_weight`` adds a CTC loss on the encoder; ``fastemit`` is the lambda of Yu et al. (2021).
    """

    beam = "beam"

    def __init__(
        self,
        tokenizer: Tokenizer,
        encoder: Encoder,
        prediction: Prediction | None = None,
        joint: Joint | None = None,
        ctc_weight: float = 0.0,
        fastemit: float = 0.0,
        freeze_encoder_steps: float = 0,
    ) -> None:
        if fastemit < 0:
            raise ValueError(f"fastemit={fastemit}: it must be at least 0")
        super().__init__(tokenizer, encoder, freeze_encoder_steps)
        self.prediction = prediction or LSTMPrediction()
        self.prediction.connect(tokenizer.size - 1)
        self.joint = joint or Joint()
        self.joint.connect(encoder.width, self.prediction.width, tokenizer.size)
        self.ctc_weight = ctc_weight
        self.ctc = nn.Linear(encoder.width, tokenizer.size) if ctc_weight > 0 else None
        self.fastemit = fastemit

    def losses(self, encoded: Tensor, lengths: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        policy, joint, blank = self.policy, self.joint, self.tokenizer.blank
        sides = joint.encoder(encoded), joint.prediction(self.prediction(batch.labels))
        if policy.lstm_segment:  # the loss is a graph of its own
            sides = EndSegment.apply(policy.mark_step, *sides)  # type: ignore[no-untyped-call]
        transducer = transducer_loss(
            *sides,
            weight=joint.output.weight,
            bias=joint.output.bias,
            labels=batch.labels,
            encoder_lengths=lengths,
            label_lengths=batch.label_lengths,
            blank=blank,
            dropout=joint.dropout if self.training else 0.0,
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
        symbols = batch.label_lengths
        ctc = ctc_loss(scores, batch.labels, lengths, symbols=symbols, blank=blank, static=is_static)
        count = batch.weight.sum()
        parts: Sums = {
            "loss_transducer": ((transducer.detach() * batch.weight).sum(), count),
            "loss_ctc": ((ctc.detach() * batch.weight).sum(), count),
        }
        return transducer + self.ctc_weight * ctc, parts

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
        """The encoder's memory, and the recursion of the loss: about 200 bytes per lattice cell."""
        return Footprint(self.encoder.activation_bytes(), 200 / self.frame_seconds)
