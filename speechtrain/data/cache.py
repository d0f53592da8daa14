"""The folder that keeps indices and joined audio between runs."""

from __future__ import annotations

import os
from pathlib import Path

from speechtrain.files import absolute_path


def cache_folder() -> Path:
    """Return ``$SPEECHTRAIN_CACHE``, else ``$XDG_CACHE_HOME/speechtrain``, else ``~/.cache/speechtrain``.

    Missing files in the folder are made again.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return absolute_path(os.environ.get("SPEECHTRAIN_CACHE") or f"{base}/speechtrain")
