"""``batchloom`` with the settings of the Hub in the environment, from a warm interpreter.

``python -m media.prepare_from_hub prepare WORDS...``
"""

import importlib
import sys

import huggingface_hub.constants

from batchloom.cli import run_command_line

if __name__ == "__main__":
    # They were read from the environment of the interpreter that this one was forked from.
    importlib.reload(huggingface_hub.constants)
    sys.exit(run_command_line(sys.argv[1:]))
