"""The program of a rank: ``python -m speechtrain.rank RUN/config.yaml``. All launchers start it."""

from __future__ import annotations

import faulthandler

from speechtrain.errors import escape_output
from speechtrain.rank.main import end_process, main

if __name__ == "__main__":
    escape_output()
    faulthandler.enable()  # If a native library aborts the process, the stack is printed.
    end_process(main(is_watched=True))
