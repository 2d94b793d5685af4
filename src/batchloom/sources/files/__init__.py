"""Access to input bytes: discovery, archives, compression, standard input, Hub.

Read `part_stream.py` first: it defines `Source` and the rules by which sources are read.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
