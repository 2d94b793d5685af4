"""Two ranks of the command line on a multimodal model: ``media_ranks_worker.py ARGUMENTS...``."""

import sys

from transformers import AutoModelForMultimodalLM, LlavaForConditionalGeneration

from adapters.forked_ranks import fork_second_rank
from batchloom.cli import run_command_line

# The ranks share this import.
_MODELS = (AutoModelForMultimodalLM, LlavaForConditionalGeneration)

if __name__ == "__main__":
    with fork_second_rank():
        assert run_command_line(sys.argv[1:]) == 0
