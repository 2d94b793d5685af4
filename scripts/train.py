"""train.py --model_name tiny --input_file FILE | --dataset_dir STORE --config_file FILE --max_iters 100.

Every option of ``batchloom train``, which this is; under torchrun each process is a rank.
"""

import sys

from batchloom.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["train"]
    main()
