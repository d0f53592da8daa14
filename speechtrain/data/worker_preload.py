"""Imports for the fork server of the data workers. The server imports this module once for all workers."""

from __future__ import annotations

import warnings

import speechtrain.data.lhotse_audio
import speechtrain.data.loader  # noqa: F401 - The workers inherit both imports.

# multiprocessing runs the program's module again in each worker, under another name. runpy warns about this,
# because the server has already imported the module. The second run takes no time.
warnings.filterwarnings(
    "ignore", message=".* found in sys.modules after import of package", category=RuntimeWarning
)
