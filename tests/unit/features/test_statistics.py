from __future__ import annotations

import torch
from torch import Tensor

from speechtrain.features.statistics import normalised_by_loud


def by_population(x: Tensor, squares: Tensor, count: Tensor) -> Tensor:
    return x / (squares / count).sqrt()


def test_loud_columns_give_the_mean_and_the_deviation() -> None:
    columns = torch.randn(2, 50, 4)
    columns[:, 20:40] -= 20.0
    weight = (torch.arange(50) < torch.tensor([[50], [45]])).float()[:, :, None]
    normalised = normalised_by_loud(columns, weight, by_population)
    for row, length in ((0, 50), (1, 45)):
        loud = torch.cat([columns[row, :20], columns[row, 40:length]])
        deviation, mean = torch.std_mean(loud, 0, correction=0)
        torch.testing.assert_close(normalised[row, :length], (columns[row, :length] - mean) / deviation)
    assert not normalised[1, 45:].any()
