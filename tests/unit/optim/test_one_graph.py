"""Updates stay in one graph on PyTorch's lazy tensors: no fall-back, no compilation after the second step."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, warnings
warnings.filterwarnings("ignore")
import torch, torch._lazy, torch._lazy.metrics as metrics
from speechtrain.devices.lazy import Lazy
Lazy().open(0)
torch.set_num_threads(1)
from speechtrain.optim.adamw import AdamW
from speechtrain.optim.ema import EMA
from speechtrain.optim.lamb import LAMB
from speechtrain.optim.novograd import NovoGrad

seen = {}
plain = {"foreach": False, "fused": False}
forms = [(AdamW, plain | {"form": form}) for form in ("torch", "fairseq", "intel")]
for cls, settings in (*forms, (LAMB, {}), (NovoGrad, {})):
    cpu = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    lazy = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    lazy.load_state_dict(cpu.state_dict())
    lazy.to("lazy")
    models = (cpu, lazy)
    # equal numbers share a node of the graph: 1 - 0.25 is also a weight of the average's warm-up
    optimizers = [cls(m.parameters(), betas=(0.95, 0.26), **settings) for m in models]
    averages = [EMA(m, 0.99) for m in models]
    torch._lazy.mark_step()
    metrics.reset()
    compilations = []
    for step in range(6):
        for a, b in zip(cpu.parameters(), lazy.parameters()):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.to("lazy")
        for model, optimizer, average in zip(models, optimizers, averages):
            optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
            optimizer.step()
            average.update(model)
        torch._lazy.mark_step()
        compilations.append(metrics.counter_value("UncachedCompile") or 0)
    fallbacks = [name for name in metrics.counter_names() if name.startswith("aten::")]
    states = [m.state_dict() for m in models], [a.state_dict()["average"] for a in averages]
    worst = max(float((own[k] - other[k].cpu()).abs().max()) for own, other in states for k in own)
    name = " ".join([cls.__name__, settings.get("form", "")]).strip()
    seen[name] = {"compilations": compilations, "fallbacks": fallbacks, "worst": worst}
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_updates_are_one_graph_and_equal_those_of_the_cpu() -> None:
    # a process of its own: the backend registers its device for good
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen.keys() == {"AdamW torch", "AdamW fairseq", "AdamW intel", "LAMB", "NovoGrad"}
    for result in seen.values():
        assert result["fallbacks"] == []
        assert result["compilations"][-1] == result["compilations"][1], result
        assert result["worst"] < 1e-6
    for name in ("AdamW torch", "LAMB", "NovoGrad"):  # The other forms of AdamW have the graph of torch's.
        assert seen[name]["compilations"][1] > 0
