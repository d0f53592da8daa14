"""The joint network of a transducer: the sum of two projections, ReLU, and an output layer.

Legend: H hidden width, V classes with the blank.
"""

from __future__ import annotations

from torch import Tensor, nn


class Joint(nn.Module):
    """An additive joint (Graves, 2013); the transducer loss computes it for the whole lattice.

    With ``bias`` ``both``, both projections have a bias (MLPerf); with ``single``, only the encoder's has
    one, so the joint equals Intel's older Linear over the concatenation, its weight split in two.
    """

    def __init__(self, hidden: int = 512, dropout: float = 0.3, bias: str = "both") -> None:
        super().__init__()
        if bias not in ("both", "single"):
            raise ValueError(f"bias is {bias!r}; it must be both or single")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}; it must be at least 0 and below 1")
        if hidden < 1:
            raise ValueError(f"hidden is {hidden}; it must be at least 1")
        self.hidden, self.dropout, self.bias = hidden, dropout, bias

    def connect(self, encoder: int, prediction: int, classes: int) -> None:
        """Create the layers for inputs of these widths; the model calls it once."""
        self.encoder = nn.Linear(encoder, self.hidden)
        self.prediction = nn.Linear(prediction, self.hidden, bias=self.bias == "both")
        self.output = nn.Linear(self.hidden, classes)

    def forward(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """Map two projected inputs (…, H) to logits (…, V), without dropout."""
        logits: Tensor = self.output((encoded + predicted).relu())
        return logits
