"""The outcome of the rehearsal for planted faults. The table is in docs/benchmarks/devices.md."""

from __future__ import annotations

import pytest

from tests.rehearsal.planted_faults import FAULTS, Fault, agrees, outcomes

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_outcomes_are_the_expected_ones(fault: Fault) -> None:
    for device, (outcome, text) in outcomes(fault).items():
        assert agrees(getattr(fault, device), outcome), f"{device}: {outcome} {text}"
