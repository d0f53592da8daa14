"""The joint network of a transducer: the sum of two projections, ReLU, and an output layer.

Legend: H hidden width, V classes with the blank, K durations. A TDT joint (token-and-duration transducer, Xu
et al., 2023) also predicts the number of frames, the duration, by which a path advances.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from speechtrain.errors import require_least, require_shares

_MAX_DURATION = 32  # frames. The memory of the loss grows with the longest duration.


def check_durations(durations: Sequence[int]) -> tuple[int, ...]:
    """Return ``durations`` as a tuple, which is empty for a joint without durations.

    Raises ValueError unless they are whole numbers of frames in ascending order, and the last is above 0.
    """
    if not durations:
        return ()
    is_whole = all(type(d) is int and 0 <= d <= _MAX_DURATION for d in durations)
    is_ascending = is_whole and list(durations) == sorted(set(durations))
    if not is_ascending or not durations[-1]:
        needed = f"whole numbers of frames, ascending, 0 to {_MAX_DURATION}, at least one of them above 0"
        raise ValueError(f"durations is {list(durations)}. It must be {needed}")
    return tuple(durations)


class Joint(nn.Module):
    """An additive joint (Graves, 2013). The transducer loss computes it for the whole lattice.

    If ``bias`` is ``both``, both projections have a bias (MLPerf). If it is ``single``, only the projection
    of the encoder has a bias. The joint then equals Intel's older Linear layer over the concatenated inputs,
    with its weight split in two.

    With ``durations``, in frames, this is a TDT joint: the output layer has one more row for each duration.
    """

    def __init__(
        self,
        hidden: int = 512,
        dropout: float = 0.3,
        bias: str = "both",
        durations: list[int] | None = None,
    ) -> None:
        super().__init__()
        if bias not in ("both", "single"):
            raise ValueError(f"bias is {bias!r}. It must be both or single")
        require_shares(dropout=dropout)
        require_least(1, hidden=hidden)
        self.hidden, self.dropout, self.bias = hidden, dropout, bias
        self.durations = check_durations(durations or ())

    def connect(self, encoder: int, prediction: int, classes: int) -> None:
        """Create the layers for inputs of these widths. The model calls this once."""
        self.encoder = nn.Linear(encoder, self.hidden)
        self.prediction = nn.Linear(prediction, self.hidden, bias=self.bias == "both")
        self.output = nn.Linear(self.hidden, classes + len(self.durations))

    def forward(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """Map the projections (…, H) of encoder and prediction to logits (…, V + K), without dropout."""
        logits: Tensor = self.output((encoded + predicted).relu())
        return logits
