"""Export of stores to Megatron, flat, Parquet, `datasets` and MDS files.

Read `export_targets.py` first.
"""
