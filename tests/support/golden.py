"""The golden losses, and how far another CPU may be from them."""

from __future__ import annotations

STEPS = 20


# rounding differs between CPUs, and each update carries it on: a narrow band first, a wider one later
BANDS = {"fp32": (1e-4, 5e-3), "bf16": (2e-2, 6e-2)}
