"""Shell completion: Hydra's, for both names of the program, for ``final_decoder`` and without base YAMLs.

A shell sets ``COMP_LINE`` to the line that the user has typed so far, and calls the program with ``-sc``.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from speechtrain.start.choices import config_dir
from speechtrain.start.command_line import translate_arguments
from speechtrain.start.schema import BORROWED_GROUPS

_PROGRAM = "speechtrain-train"


def print_completions(app: Callable[[], object]) -> None:
    """Print what Hydra's ``app`` prints for the option ``-sc`` in ``sys.argv``.

    A line that Hydra cannot compose has no completions.
    """
    line = re.sub(r"^\s*(\S*/)?speechtrain\s+train(?=\s|$)", _PROGRAM, os.environ.get("COMP_LINE", ""))
    typed_words = line.split()[1:] or [""]
    if line.endswith(" "):
        typed_words.append("")
    *words, word = typed_words
    key, equals, value = word.partition("=")
    group = ""
    if key in BORROWED_GROUPS and equals:  # The choices of final_decoder= are those of decoder=.
        group = BORROWED_GROUPS[key].partition("@")[0]
        word = f"{group}={value}"
    os.environ["COMP_LINE"] = " ".join([_PROGRAM, *translate_arguments(words), word])
    folder = config_dir(words)
    if folder:
        sys.argv += ["--config-dir", folder]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(HydraException, OmegaConfBaseException):
        app()
    # Completions are separated by white space. A choice has its group before it: GROUP=_NAME.
    text = re.sub(r"(?<!\S)(\S*=)?_\w+\s?", "", output.getvalue())
    if "install=bash" in sys.argv:
        text = f"{text.rstrip()} speechtrain\n"
    elif group:
        text = re.sub(rf"(?<!\S){group}=", f"{key}=", text)
    elif word and not equals:
        names = [f"{name}=" for name in BORROWED_GROUPS if name.startswith(word)]
        text = " ".join([*names, text])
    print(text, end="")
