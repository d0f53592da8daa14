"""The joint network of a transducer: the sum of two projections, ReLU, and an output layer.

Legend: H hidden width, V classes with the blank, K durations.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from speechtrain.errors import require_least, require_shares

_LONGEST = 32  # the loss has memory for each arc up to the longest


def check_durations(durations: Sequence[int]) -> tuple[int, ...]:
    """The durations of a TDT joint, if they can be; none are no TDT."""
    given = tuple(durations)
    is_whole = all(type(d) is int and 0 <= d <= _LONGEST for d in given)
    if given and not (is_whole and list(given) == sorted({*given}) and given[-1]):
        needed = f"whole numbers of frames, ascending, 0 to {_LONGEST}, at least one of them above 0"
        raise ValueError(f"durations is {list(given)}; it must be {needed}")
    return given


class Joint(nn.Module):
    """An additive joint (Graves, 2013); the transducer loss computes it for the whole lattice.

    With ``bias`` ``both``, both projections have a bias (MLPerf); with ``single``, only the encoder's has
    one, so the joint equals Intel's older Linear over the concatenation, its weight split in two.
    ``durations``, in frames, make it that of TDT (Xu et al., 2023): the output layer has a row for each.
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
            raise ValueError(f"bias is {bias!r}; it must be both or single")
        require_shares(dropout=dropout)
        require_least(1, hidden=hidden)
        self.hidden, self.dropout, self.bias = hidden, dropout, bias
        self.durations = check_durations(durations or ())

    def connect(self, encoder: int, prediction: int, classes: int) -> None:
        """Create the layers for inputs of these widths; the model calls it once."""
        self.encoder = nn.Linear(encoder, self.hidden)
        self.prediction = nn.Linear(prediction, self.hidden, bias=self.bias == "both")
        self.output = nn.Linear(self.hidden, classes + len(self.durations))

    def forward(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """Map two projected inputs (…, H) to logits (…, V + K), without dropout."""
        logits: Tensor = self.output((encoded + predicted).relu())
        return logits
