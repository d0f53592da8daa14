"""A decoder for a model that leaves words out: the best path of CTC, with a penalty on blanks."""

from torch import Tensor

from speechtrain.decoding.base import CTCScorer, Decoder, Hypothesis, Scorer
from speechtrain.decoding.greedy import Greedy
from speechtrain.errors import ConfigError


class BlankPenalty(Decoder):
    """Greedy search after ``penalty`` has been subtracted from the blank's log-probability."""

    def __init__(self, penalty: float = 1.0) -> None:
        self.penalty = penalty

    def decode(self, scorer: Scorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        if not isinstance(scorer, CTCScorer):
            raise ConfigError("decoder=blank_penalty searches CTC models only. Use decoder=greedy")
        lowered = frames.clone()
        lowered[..., scorer.blank] -= self.penalty
        return Greedy().decode(scorer, lowered, lengths)
