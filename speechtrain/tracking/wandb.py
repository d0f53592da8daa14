"""Events as a run of Weights & Biases, or of trackio, which has the same interface."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from speechtrain.errors import ConfigError, MachineError, RunError
from speechtrain.files import holds_secret
from speechtrain.run_directory import CONFIG, read_stored_config
from speechtrain.tracking.base import Tracker, scalars

_ENVIRONMENT = {
    "WANDB_SILENT": "true",  # The console has its own lines, and nobody answers a prompt.
    "WANDB_CONSOLE": "off",  # Stdout is not redirected.
    "WANDB_ERROR_REPORTING": "false",  # An offline run opens no connection.
}


@final
class WandB(Tracker):
    """Sends the numbers of ``train`` and ``valid`` events to a run of ``project`` named after the folder.

    The service gets the run's config, unless it holds a secret. Without an API key, wandb writes to
    ``<run_dir>/wandb`` only, for ``wandb sync``. A resumed run continues its run in the service.
    """

    def __init__(
        self, run_dir: str, module: str = "wandb", project: str = "speechtrain", enabled: bool = True
    ) -> None:
        """``module`` is the package, wandb or trackio."""
        if module not in ("wandb", "trackio"):
            raise ConfigError(f"module is {module!r}, but it must be wandb or trackio")
        self.run_dir = Path(run_dir)
        self.module = module
        self.project = project
        self.enabled = enabled
        self._start: Mapping[str, Any] = {}
        self._resume = "never"
        self._exit_codes: list[int] = []
        self._run: Any = None

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        """Send one event. Raises MachineError without the package, and any error of the service's client."""
        if event == "start":  # The next event shows whether the run continues from a checkpoint.
            if importlib.util.find_spec(self.module) is None:
                raise MachineError(f"install it with: pip install {self.module}")
            self._start = values
        elif event == "resume":
            self._resume = "allow"
        elif event in ("train", "valid"):
            if self._run is None:
                self._run = self._open()
            self._run.log(scalars(event, values), step=values["step"])
        elif event == "end" and values["status"] == "failed" and self.module == "wandb":
            self._exit_codes = [1]

    def close(self) -> None:
        """Finish the run in the service."""
        if self._run is not None:
            self._run.finish(*self._exit_codes)

    def _open(self) -> Any:
        folder = self.run_dir / "wandb"
        if folder.is_symlink():  # Wandb would write to its target.
            raise RunError(f"{folder} is a link. Remove it")
        config = read_stored_config(self.run_dir / CONFIG)
        settings = {} if holds_secret(config.text) else config.values
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        module = importlib.import_module(self.module)
        options: dict[str, Any] = {"config": {**settings, "start": self._start}, "resume": self._resume}
        if self.module == "wandb":  # Trackio lacks these options.
            options["dir"] = str(self.run_dir)
            if self._resume == "allow":
                # The latest folder has a name like run-20261125_120000-ID.
                names = [path.name.partition("run-")[2] for path in folder.glob("*run-*-*")]
                options["id"] = max(names, default="").rpartition("-")[2] or None
            if "WANDB_MODE" not in os.environ and not module.login(prompt=False):
                options["mode"] = "offline"
        return module.init(project=self.project, name=self.run_dir.name, **options)
