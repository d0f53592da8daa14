"""Studies: a search for the values of keys that train best, by Hydra or by ask and tell."""

from __future__ import annotations

from importlib.util import find_spec

from speechtrain.errors import ConfigError


def require_optuna() -> None:
    """Raise ConfigError if optuna, which studies need, is not installed."""
    if find_spec("optuna") is None:
        raise ConfigError("a study needs optuna; pip install 'speechtrain[study]'")


def trial_folder(number: int) -> str:
    """Return the name of the run directory of a trial in the folder of its study."""
    return f"trial-{number:03}"
