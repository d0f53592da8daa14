"""The doctor's outcome for planted faults. The table of all is in docs/benchmarks/devices.md."""

from __future__ import annotations

import pytest

from tests.support.planted import Fault
from tests.support.planted_faults import FAULTS, agrees, outcomes

IN_EACH_RUN = ("F10", "F18")
"""A copy and a graph. The other faults are nightly, because each takes half a minute."""
PARAMETERS = [
    pytest.param(
        fault,
        id=fault.name,
        marks=pytest.mark.slow if fault.name.startswith(IN_EACH_RUN) else pytest.mark.nightly,
    )
    for fault in FAULTS
]


@pytest.mark.parametrize("fault", PARAMETERS)
def test_outcomes_are_the_expected_ones(fault: Fault) -> None:
    for device, (outcome, text) in outcomes(fault).items():
        assert agrees(getattr(fault, device), outcome), f"{device}: {outcome} {text}"
