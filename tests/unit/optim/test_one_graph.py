"""Optimizers and the weight average on PyTorch's lazy tensors compile no graph after the second update."""

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
from speechtrain.optim.muon import Muon
from speechtrain.optim.novograd import NovoGrad

results = {}
plain = {"foreach": False, "fused": False}
forms = [(AdamW, plain | {"form": form}) for form in ("torch", "fairseq", "intel")]
muon = plain | {"min_side": 3, "bf16": False}
for cls, settings in (*forms, (LAMB, {}), (NovoGrad, {}), (Muon, muon)):
    cpu = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    lazy = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    lazy.load_state_dict(cpu.state_dict())
    lazy.to("lazy")
    models = (cpu, lazy)
    # A lazy graph has one node for equal numbers, so its shape depends on which numbers are equal. The beta
    # is not 0.25, because 1 - 0.25 is also a weight in the warm-up of the average.
    optimizers = [cls(m.parameters(), betas=(0.95, 0.26), **settings) for m in models]
    averages = [EMA(m, 0.99) for m in models]
    torch._lazy.mark_step()
    metrics.reset()
    compilations = []
    for step in range(6):
        for cpu_parameter, lazy_parameter in zip(cpu.parameters(), lazy.parameters()):
            cpu_parameter.grad = torch.randn(cpu_parameter.shape)
            lazy_parameter.grad = cpu_parameter.grad.to("lazy")
        for model, optimizer, average in zip(models, optimizers, averages):
            optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
            optimizer.step()
            average.update(model)
        torch._lazy.mark_step()
        compilations.append(metrics.counter_value("UncachedCompile") or 0)
    fallbacks = [name for name in metrics.counter_names() if name.startswith("aten::")]
    differences = []
    for cpu_tensors, lazy_tensors in (
        (cpu.state_dict(), lazy.state_dict()),
        (averages[0].state_dict()["average"], averages[1].state_dict()["average"]),
    ):
        for key, cpu_tensor in cpu_tensors.items():
            difference = cpu_tensor - lazy_tensors[key].cpu()
            differences.append(float(difference.abs().max()))
    name = " ".join([cls.__name__, settings.get("form", "")]).strip()
    results[name] = {"compilations": compilations, "fallbacks": fallbacks, "worst": max(differences)}
print(json.dumps(results))
"""


@pytest.mark.slow
def test_optimizers_on_lazy_tensors_compile_one_graph_and_equal_the_cpu() -> None:
    # The program is a separate process, because a process cannot unregister the lazy device.
    process = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    results = json.loads(process.stdout.splitlines()[-1])
    names = {"AdamW torch", "AdamW fairseq", "AdamW intel", "LAMB", "NovoGrad", "Muon"}
    assert results.keys() == names
    for result in results.values():
        assert result["fallbacks"] == []
        assert result["compilations"][-1] == result["compilations"][1], result
        assert result["worst"] < 1e-6
    for name in (
        "AdamW torch",
        "LAMB",
        "NovoGrad",
        "Muon",
    ):  # The other forms of AdamW reuse the graph of torch's form.
        assert results[name]["compilations"][1] > 0
