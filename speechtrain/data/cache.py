"""The cache folder, which stores indices and joined audio for all runs."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

from speechtrain.files import absolute_path


def cache_folder() -> Path:
    """Return ``$SPEECHTRAIN_CACHE``, else ``$XDG_CACHE_HOME/speechtrain``, else ``~/.cache/speechtrain``.

    An empty variable counts as not set. Without a home folder, it is a temporary folder of this process. A
    file that was deleted from the folder is made again when a run needs it.
    """
    user_cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if user_cache.startswith("~"):
        user_cache = _temporary_folder().name
    return absolute_path(os.environ.get("SPEECHTRAIN_CACHE") or f"{user_cache}/speechtrain")


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="speechtrain-")
