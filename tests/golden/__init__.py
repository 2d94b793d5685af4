"""Golden tests: behaviour that restructuring must not change.

``python -m pytest tests/golden`` compares everything with the files in ``expected/``.
``BATCHLOOM_WRITE_GOLDEN=1 python -m pytest tests/golden`` rewrites them; review the diff.

``inputs.py`` writes the inputs, and ``recipes.py`` lists the jobs. ``interface.py`` imports the names
of the product that are not in ``batchloom.__all__``. ``expectations.py`` compares and rewrites
expectations; ``batch_digests.py`` and ``store_digests.py`` compute what it compares.
"""
