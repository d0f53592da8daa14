"""A network of your own, trained as in ``by_hand.py``: convolutions and CTC."""

from by_hand import train
from torch import Tensor, nn
from torch.nn import functional as F

from speechtrain.batch import Batch
from speechtrain.decoding.base import CTCScorer
from speechtrain.decoding.greedy import Greedy
from speechtrain.features.logmel import LogMel
from speechtrain.metrics import error_rates
from speechtrain.task import Evaluation, Loss, Task, examples_of
from speechtrain.text.vocabulary import Tokenizer


class Convolutions(Task):
    """Two convolutions over log-mel frames, which halve the number T of frames, and the CTC loss."""

    metric = "wer"  # It chooses the best checkpoint.

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.features = LogMel(mels=40, normalise="loud", splice=1)
        first = nn.Conv1d(40, 256, kernel_size=11, stride=2, padding=5)
        self.network = nn.Sequential(first, nn.ReLU(), nn.Conv1d(256, tokenizer.size, 31, padding=15))

    def scores(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities (B, T, V), their lengths (B,) and the loss (B,) of each row."""
        frames, lengths = self.features(batch.audio, batch.audio_lengths, keys=batch.keys)
        scores, lengths = self.network(frames.mT).mT.log_softmax(-1), (lengths + 1) // 2
        inputs = (scores.transpose(0, 1), batch.labels, lengths, batch.label_lengths)
        losses = F.ctc_loss(*inputs, blank=self.tokenizer.blank, reduction="none", zero_infinity=True)
        return scores, lengths, losses * batch.weight

    def forward(self, batch: Batch) -> Loss:
        _, _, losses = self.scores(batch)
        return Loss(losses.sum(), batch.weight.sum())

    def evaluate(self, batch: Batch, decoder: None) -> Evaluation:
        scores, lengths, losses = self.scores(batch)
        examples = examples_of(batch, Greedy().decode(CTCScorer(self.tokenizer, 0.02), scores, lengths))
        rates = error_rates((example.reference, example.hypothesis) for example in examples)
        return Evaluation(rates | {"loss": (losses.sum(), batch.weight.sum())}, examples)


if __name__ == "__main__":
    train(Convolutions, "runs/own_module")
