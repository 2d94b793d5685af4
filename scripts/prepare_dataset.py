"""prepare_dataset.py --input_files A B --out_dir DIR --tokenization gpt2 --tokens_per_shard 100M.

Also --no_dedup and --no_normalize, and every option of ``batchloom prepare``, which this is.
"""

import sys

from batchloom.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["prepare"]
    main()
