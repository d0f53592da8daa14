from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import nn

from speechtrain.compute_policy import apply_policy
from speechtrain.errors import ConfigError
from speechtrain.export import graphs
from speechtrain.export.graphs import Graph, write_graph
from speechtrain.features.logmel import LogMel


class _HostRead(nn.Module):
    def forward(self, audio: torch.Tensor) -> torch.Tensor:
        return audio * (1 if audio.sum().item() > 0 else 2)


@pytest.mark.slow
def test_write_graph_keeps_a_small_log_floor(tmp_path: Path) -> None:
    """onnxscript takes an addition of up to 1e-8 for an addition of 0, and the logarithm of silence fails."""
    features = LogMel(form="torch", log_floor=1e-8, dither=0.0, splice=1).eval()
    apply_policy(features, graphs._POLICY)
    audio = torch.cat([torch.zeros(1, 4000), 0.1 * torch.randn(1, 8000)], 1)
    inputs = {"audio": audio, "offset": torch.zeros(1, dtype=torch.int64)}
    graph = Graph(graphs._Features(features), inputs, ("features", "feature_lengths"), {"audio": (1,)})
    expected = graph.example_outputs()["features"]
    write_graph(graph, tmp_path / "features.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "features.onnx")
    result = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0]
    torch.testing.assert_close(torch.from_numpy(result), expected, rtol=0, atol=1e-3)


def test_write_graph_names_the_key_of_a_module_that_torch_cannot_export(tmp_path: Path) -> None:
    graph = Graph(_HostRead(), {"audio": torch.ones(1, 100)}, ("frames",), {"audio": (1,)}, key="encoder")
    with pytest.raises(
        ConfigError, match=r"^encoder: torch cannot write it as ONNX \(.*\)\. Choose another$"
    ):
        write_graph(graph, tmp_path / "encoder.onnx")
    assert not list(tmp_path.iterdir())
