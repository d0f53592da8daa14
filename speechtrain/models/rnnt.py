"""RNN-T: an encoder, a prediction network and an additive joint (Graves, 2012, and MLPerf RNN-T).

Legend: B rows, T encoder frames, U labels, H joint width, V classes (blank last).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from speechtrain.batch import Batch, Footprint
from speechtrain.counter_rng import JointStream, bits_at
from speechtrain.decoding.base import Scorer, TransducerScorer
from speechtrain.encoders.base import Encoder
from speechtrain.errors import ConfigError, require_least
from speechtrain.losses.transducer import transducer_loss
from speechtrain.models.recogniser import Recogniser
from speechtrain.nn.joint import Joint
from speechtrain.nn.prediction import LSTMPrediction, Prediction
from speechtrain.nn.segments import end_encoder
from speechtrain.task import Sums
from speechtrain.text.vocabulary import Tokenizer


class RNNT(Recogniser):
    """RNN-T recognition, trained by the exact transducer loss.

    ``ctc_weight`` is the weight of an additional CTC loss on the encoder. ``fastemit`` is the lambda of Yu et
    al. (2021), and ``delay_penalty`` the lambda of Kang et al. (2023), which is 0 in evaluation. A joint with
    durations makes the model a TDT (Xu et al., 2023), whose logit under-normalisation is ``sigma``.

    If ``joint_rows`` is above 0, the joint and the loss are computed for slices of this number of rows, one
    after the other. This limits their memory to one slice. A slice is cut to its longest row unless shapes
    are static. Dropout draws a mask for each slice.
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
        delay_penalty: float = 0.0,
        consistency: float = 0.0,
    ) -> None:
        require_least(0, fastemit=fastemit, delay_penalty=delay_penalty, joint_rows=joint_rows)
        if consistency and not ctc_weight:
            raise ConfigError("consistency needs the CTC loss of model.ctc_weight. Set it above 0")
        if encoder.middle_ctc and not ctc_weight:
            raise ConfigError("encoder.middle_ctc needs the CTC loss of model.ctc_weight. Set it above 0")
        super().__init__(tokenizer, encoder, freeze_encoder_steps, encoder_lr_scale, consistency)
        self.prediction = prediction or LSTMPrediction()
        self.prediction.connect(tokenizer.size - 1)
        self.joint = joint or Joint()
        _check_durations(self.joint, fastemit, sigma)
        # ``beam`` names the search that ``Task.beam`` describes. That search does not support durations.
        self.beam = "" if self.joint.durations else "beam"
        self.joint.connect(encoder.width, self.prediction.width, tokenizer.size)
        self.ctc_weight = ctc_weight
        self.ctc = nn.Linear(encoder.width, tokenizer.size) if ctc_weight > 0 else None
        self.fastemit, self.joint_rows, self.sigma = fastemit, joint_rows, sigma
        self.delay_penalty = delay_penalty

    @property
    def dropout(self) -> float:
        """The dropout rate of the joint, which is 0 in evaluation."""
        return self.joint.dropout if self.training else 0.0

    def prepare(self, batch: Batch, seed: int) -> Batch:
        """Add the seeds of the joint's dropout to the batch: two int32 for each slice of its rows.

        The mode of the module does not matter, because callers may prepare a batch before ``train()``.
        """
        batch = super().prepare(batch, seed)
        if not self.joint.dropout:
            return batch
        rows = self.view_count * len(batch.audio)
        rows_per_slice = self.joint_rows or rows
        slices = -(-rows // rows_per_slice)  # rounded up
        seeds = bits_at(seed, JointStream.DROPOUT, np.arange(slices, dtype=np.int64))
        halves = torch.from_numpy(seeds.view(np.int32).reshape(slices, 2))
        return replace(batch, extra=batch.extra | {"joint_seeds": halves})

    def losses(self, encoded: Tensor, lengths: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        transducer = self._transducer_losses(encoded, lengths, batch)
        if self.ctc is None:
            return transducer, {}
        ctc = self.ctc_losses(self.ctc_scores(encoded), lengths, batch)
        count = batch.weight.sum()
        metrics: Sums = {
            "loss_transducer": ((transducer.detach() * batch.weight).sum(), count),
            "loss_ctc": ((ctc.detach() * batch.weight).sum(), count),
        }
        return transducer + self.ctc_weight * ctc, metrics

    def ctc_scores(self, encoded: Tensor) -> Tensor:
        assert self.ctc is not None  # The constructor needs it for the losses that read the scores.
        scores: Tensor = self.ctc(encoded).float().log_softmax(-1)
        return scores

    def _transducer_losses(self, encoded: Tensor, lengths: Tensor, batch: Batch) -> Tensor:
        """Return the transducer loss (B,) of each row, computed for ``joint_rows`` rows at a time."""
        encoder = self.joint.encoder(encoded)
        prediction = self.joint.prediction(self.prediction(batch.labels))
        encoder, prediction = end_encoder(self.policy, encoder, prediction)
        inputs = (encoder, prediction, batch.labels, lengths, batch.label_lengths)
        seeds = batch.extra["joint_seeds"] if self.dropout else None
        if not self.joint_rows:
            return self._transducer(0 if seeds is None else seeds[0], *inputs)
        slices = zip(*(torch.split(tensor, self.joint_rows) for tensor in inputs), strict=True)
        losses = []
        for number, slice_inputs in enumerate(slices):
            seed = 0 if seeds is None else seeds[number]
            losses.append(self._transducer(seed, *self._cut(*slice_inputs)))
        return torch.cat(losses)

    def _cut(
        self, encoder: Tensor, prediction: Tensor, labels: Tensor, *lengths: Tensor
    ) -> tuple[Tensor, ...]:
        """Cut the padding that no row of a slice needs."""
        frame_counts, label_counts = lengths
        frames = max(1, *self.policy.lengths_on_host(frame_counts, encoder.shape[1]))
        most_labels = max(self.policy.lengths_on_host(label_counts, labels.shape[1]))
        return encoder[:, :frames], prediction[:, : most_labels + 1], labels[:, :most_labels], *lengths

    def _transducer(
        self,
        seed: Tensor | int,
        encoder: Tensor,
        prediction: Tensor,
        labels: Tensor,
        frame_counts: Tensor,
        label_counts: Tensor,
    ) -> Tensor:
        """Return the transducer loss (B,) of the two projected inputs of the joint."""
        policy, joint = self.policy, self.joint
        delay_penalty = self.delay_penalty if self.training else 0.0
        return transducer_loss(
            encoder,
            prediction,
            weight=joint.output.weight,
            bias=joint.output.bias,
            labels=labels,
            encoder_lengths=frame_counts,
            label_lengths=label_counts,
            blank=self.tokenizer.blank,
            dropout=self.dropout,
            seed=seed,
            fastemit=self.fastemit,
            delay_penalty=delay_penalty,
            durations=joint.durations,
            sigma=self.sigma,
            static=policy.transducer == "static",
            compute_dtype=policy.product_dtype,
            chunk=policy.lattice_cells,
            keep=policy.logit_bytes,
        )

    def scorer(self) -> Scorer:
        prediction = self.policy.module_for_search(self.prediction)
        joint = self.policy.module_for_search(self.joint)
        return TransducerScorer(self.tokenizer, self.frame_seconds, prediction=prediction, joint=joint)

    def search_frames(self, encoded: Tensor) -> Tensor:
        frames: Tensor = self.joint.encoder(encoded)
        return frames

    def footprint(self) -> Footprint:
        """Predict the memory of the encoder and of the loss, which needs about 200 bytes per lattice cell.

        With durations, a cell has two arcs for each duration from 0 to the longest, of about 60 bytes each.
        """
        cell_bytes = 200
        if self.joint.durations:
            cell_bytes += 120 * (self.joint.durations[-1] + 1)
        cell_bytes *= self.view_count
        return Footprint(self.view_count * self.encoder.activation_bytes(), cell_bytes / self.frame_seconds)


def _check_durations(joint: Joint, fastemit: float, sigma: float) -> None:
    """Raise ValueError if an option of the loss does not suit the durations of ``joint``."""
    if sigma < 0 or (sigma and not joint.durations):
        raise ValueError(f"sigma={sigma}: it must be at least 0, and 0 without joint.durations")
    if fastemit and joint.durations:
        raise ValueError(f"fastemit={fastemit}: it must be 0 with joint.durations")
