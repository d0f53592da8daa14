"""The program of a rank, which rendered jobs name: ``python -m speechtrain.train_rank RUN/config.yaml``."""

from __future__ import annotations

import faulthandler

from speechtrain.errors import escape_output
from speechtrain.rank.main import end_process, main

if __name__ == "__main__":
    escape_output()
    faulthandler.enable()  # It prints the stack if a backend aborts.
    end_process(main(is_watched=True))
