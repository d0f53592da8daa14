from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faulty_recordings import FaultyRecordings


@pytest.fixture
def faulty_recordings(tmp_path: Path) -> FaultyRecordings:
    return FaultyRecordings(tmp_path)
