"""The cache folder, which stores indices and joined audio for all runs."""

from __future__ import annotations

import os
from pathlib import Path

from speechtrain.files import absolute_path


def cache_folder() -> Path:
    """Return ``$SPEECHTRAIN_CACHE``, else ``$XDG_CACHE_HOME/speechtrain``, else ``~/.cache/speechtrain``.

    An empty variable counts as not set. A file that was deleted from the folder is made again when a run
    needs it.
    """
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return absolute_path(os.environ.get("SPEECHTRAIN_CACHE") or f"{user_cache}/speechtrain")
