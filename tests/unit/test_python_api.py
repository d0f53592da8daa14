"""The two names of ``import speechtrain``."""

from __future__ import annotations

import subprocess
import sys

import pytest

import speechtrain

LAZY = """
import sys
import speechtrain
assert {"compose", "load", "transducer_loss"} <= set(dir(speechtrain)), dir(speechtrain)
heavy = {"torch", "numpy", "lhotse", "hydra", "omegaconf"} & set(sys.modules)
assert not heavy, heavy
speechtrain.transducer_loss
assert "torch" in sys.modules
assert "hydra" not in sys.modules
"""


def test_importing_it_loads_no_torch() -> None:
    subprocess.run([sys.executable, "-c", LAZY], check=True, timeout=300)


def test_both_names_are_what_they_say() -> None:
    from speechtrain.inference.loaded_run import load
    from speechtrain.losses.transducer import transducer_loss

    assert speechtrain.load is load
    assert speechtrain.transducer_loss is transducer_loss
    assert set(speechtrain.__all__) == {"compose", "load", "transducer_loss", "__version__"}
    name = "transducer_lost"
    with pytest.raises(AttributeError, match="transducer_lost"):
        getattr(speechtrain, name)
