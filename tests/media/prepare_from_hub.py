"""Run ``batchloom`` in a warm interpreter with the environment's Hub settings.

``python -m media.prepare_from_hub prepare WORDS...``
"""

import importlib
import sys

import huggingface_hub.constants

from batchloom.cli import run_command_line

if __name__ == "__main__":
    # The constants were read in the parent interpreter, from its environment.
    importlib.reload(huggingface_hub.constants)
    sys.exit(run_command_line(sys.argv[1:]))
