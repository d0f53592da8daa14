"""Short runs of both models whose losses every device is compared by."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.golden import GOLDEN

STEPS = 50
SHAPES = "data.shapes=1"  # devices with static shapes need it, and the CPU's batches must be the same
COMMON = [
    *("augment=none", "tracking=jsonl", "data.workers=0", "trainer.log_every=1", "schedule=constant"),
    *("trainer.max_epochs=null", f"trainer.max_steps={STEPS}", f"trainer.validate_every={STEPS}"),
    *("data.batch.count=2", "data.train.utterances=24", "data.valid.unheard.utterances=2"),
    *("data.max_seconds=4", SHAPES),
]
RECIPES = {
    "rnnt": [
        *("recipe=demo", "encoder.hidden=32", "encoder.features.mels=20", "model.prediction.hidden=32"),
        *("model.prediction.embedding=16", "model.joint.hidden=32", "decoder.max_symbols=30"),
        *("encoder.dropout=0", "model.prediction.dropout=0", "model.joint.dropout=0"),
        *("encoder.features.dither=0", "augment.warp=0", "schedule.warmup_steps=60"),
    ],
    "wav2vec2": [
        *("model=wav2vec2_small", "data=digits", "model.target_dropout=0", "model.host_noise=true"),
        *("model.fixed_width=true", "encoder.width=64", "encoder.layers=2", "encoder.feed_forward=128"),
        "schedule.warmup_steps=100",
        "encoder.conv_layers=[[16,10,5],[16,3,2],[32,3,2],[32,3,2],[32,3,2],[64,2,2],[64,2,2]]",
    ],
}
IN_BF16 = {"cpu": ["device.bf16=software"]}  # whatever the chip
KERNELS = {"cpu": ["device.autotune=false"], "ipex": ["device.autotune=false"]}  # torch's own kernels


def losses(folder: Path, recipe: str, device: str, precision: str) -> dict[str, dict[int, float]]:
    """Return the loss of each step, and of the validation at the end, by event. The same run is made once."""
    run_dir = folder / f"{recipe}-{device}-{precision}"
    if not run_dir.exists():
        command = [sys.executable, "-m", "speechtrain.commands.train", *RECIPES[recipe], *COMMON]
        command += [
            f"device={device}",
            f"precision={precision}",
            *KERNELS.get(device, []),
            f"run_dir={run_dir}",
        ]
        if precision == "bf16":
            command += IN_BF16.get(device, [])
        process = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        assert process.returncode == 0, process.stderr
    by_event: dict[str, dict[int, float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            by_event.setdefault(record["event"], {})[record["step"]] = record["loss"]
    return by_event


def golden(recipe: str) -> dict[str, dict[int, float]]:
    """Return the losses of the CPU in fp32 by event and step."""
    by_event: dict[str, dict[int, float]] = {}
    for line in (GOLDEN / f"parity_{recipe}.txt").read_text().splitlines()[1:]:
        event, step, loss = line.split()
        by_event.setdefault(event, {})[int(step)] = float(loss)
    return by_event
