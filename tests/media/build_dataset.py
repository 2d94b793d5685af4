"""Build the store of a ``MultiModalDataset``.

``python -m media.build_dataset CONFIG STORE``
"""

import sys

from batchloom.compat import MultiModalDataset

if __name__ == "__main__":
    dataset = MultiModalDataset(sys.argv[1], out=sys.argv[2])
    dataset.build()
    assert len(dataset)
