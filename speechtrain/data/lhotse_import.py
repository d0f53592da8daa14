"""Imports lhotse without its changes to the process. Call ``import_lhotse`` before an import of its modules.

lhotse's import creates ``~/.lhotse/tools``, adds it to ``sys.path`` and PATH, and fails without a
home folder. If the folder cannot be created, the root logger gets a handler. Only a reader of
SPHERE files needs the folder.
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import Any

_TOOLS = "lhotse.tools.env"
_LOCK = threading.Lock()


def import_lhotse() -> None:
    """Import lhotse, unless this process has imported it. Threads take turns."""
    with _LOCK:
        if "lhotse" in sys.modules:
            return
        # A stand-in takes the place of the module that creates the folder.
        stand_in: Any = ModuleType(_TOOLS)
        stand_in.add_tools_to_path = stand_in.add_macos_homebrew_lib_paths = lambda: None
        stand_in.default_tools_cachedir = _tools_folder
        sys.modules[_TOOLS] = stand_in
        try:
            importlib.import_module("lhotse")
        finally:
            del sys.modules[_TOOLS]


def _tools_folder(force_mkdir: bool = False) -> Any:
    return importlib.import_module(_TOOLS).default_tools_cachedir(force_mkdir)
