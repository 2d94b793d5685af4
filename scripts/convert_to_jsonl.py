"""convert_to_jsonl.py --dataset ORG/NAME | --csv FILE.csv --output FILE.jsonl.

Every option of ``batchloom convert``, which this is.
"""

import sys

from batchloom.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["convert"]
    main()
