"""Host of a torch.distributed store: prints its port, and waits to be killed.

``python -m batches.store_host``
"""

import signal

import torch.distributed as dist

if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    while True:
        signal.pause()
