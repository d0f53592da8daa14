"""The log-probability of each label sequence of a small lattice. Beam searches are compared with it."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby, product

import numpy as np
import torch
from torch import Tensor

from speechtrain.decoding.base import TransducerScorer
from speechtrain.nn.joint import Joint
from speechtrain.nn.prediction import LSTMPrediction, Prediction, StatelessPrediction
from tests.support.scorers import BLANK, Letters

LogProbabilities = dict[tuple[int, ...], float]
"""The log-probability of each sequence of labels."""
LONGEST = 6  # labels of a sequence that the exhaustive search visits


def small_transducer(
    seed: int, prediction: str = "lstm", durations: list[int] | None = None
) -> TransducerScorer:
    torch.manual_seed(seed)
    network: Prediction = (
        LSTMPrediction(embedding=4, hidden=8, layers=1, dropout=0.0)
        if prediction == "lstm"
        else StatelessPrediction(embedding=4, hidden=8, dropout=0.0)
    )
    network.connect(BLANK)
    joint = Joint(hidden=8, dropout=0.0, durations=durations)
    joint.connect(8, network.width, BLANK + 1)
    with torch.no_grad():
        joint.output.weight *= 4
        joint.prediction.weight *= 3
        joint.output.bias[BLANK] += 1
    return TransducerScorer(Letters(), 0.5, prediction=network.eval(), joint=joint.eval())


def transducer_sequences(scorer: TransducerScorer, frames: Tensor, lengths: Tensor) -> list[LogProbabilities]:
    """The log-probability, in fp64, of each sequence of at most LONGEST labels, for frames (B, T, H)."""
    rows, most = frames.shape[:2]
    totals: list[LogProbabilities] = [{} for _ in range(rows)]
    prediction, state = scorer.start(1)
    names: list[tuple[int, ...]] = [()]
    entering = torch.full((rows, 1, most), -torch.inf, dtype=torch.float64)
    entering[..., 0] = 0
    for _ in range(LONGEST + 1):
        logits = scorer.joint(frames[:, None], prediction[:, None])
        scores = logits.double().log_softmax(-1)
        arrivals, endings = [], []
        inside = torch.full((rows, len(names)), -torch.inf, dtype=torch.float64)
        for t in range(most):
            inside = torch.logaddexp(inside, entering[:, :, t])
            arrivals.append(inside[..., None] + scores[:, :, t, :BLANK])
            inside = inside + scores[:, :, t, BLANK]
            endings.append(inside)
        for row, length in enumerate(lengths.tolist()):
            row_totals = endings[length - 1][row].tolist()
            totals[row] |= dict(zip(names, row_totals, strict=True))
        names = [(*name, label) for name in names for label in range(BLANK)]
        labels = torch.arange(BLANK).repeat(len(prediction))
        repeated = torch.arange(len(prediction)).repeat_interleave(BLANK)
        entering = torch.stack(arrivals, -1).flatten(1, 2)
        prediction, state = scorer.step(labels, scorer.prediction.take(repeated, state))
    return totals


def ctc_sequences(scores: Tensor) -> LogProbabilities:
    """The log-probability of each sequence: the sum over all paths (4 to the number of frames)."""
    steps, classes = len(scores), range(BLANK + 1)
    paths = np.array(list(product(classes, repeat=steps)))
    log_chances = scores.double().numpy()[np.arange(steps), paths]
    chances = np.exp(log_chances.sum(1))
    totals: LogProbabilities = defaultdict(float)
    for path, chance in zip(paths.tolist(), chances, strict=True):
        labels = tuple(label for label, _ in groupby(path) if label != BLANK)
        totals[labels] += chance
    return {labels: float(np.log(chance)) for labels, chance in totals.items()}
