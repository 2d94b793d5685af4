"""Data order: integer arithmetic from document lengths to the rows of each step.

The package uses no files, clocks, environment or torch. `packing/` fills sequences, `mixture.py` weighs sources,
`order/` is the plan of a run. docs/reference/order.md is the normative specification.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
