"""The golden losses, and how far another CPU may be from them."""

from __future__ import annotations

from pathlib import Path

STEPS = 20
GOLDEN = Path(__file__).resolve().parents[1] / "golden"  # tests/golden/make.py writes its files
GOLDEN_OVERRIDES = [
    *(f"trainer.max_steps={STEPS}", "trainer.save_every=100", "trainer.validate_every=100"),
    "device.bf16=software",  # on any chip
]
# rounding differs between CPUs, and each update carries it on: a narrow band first, a wider one later
BANDS = {"fp32": (1e-4, 5e-3), "bf16": (2e-2, 6e-2)}
