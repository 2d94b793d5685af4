"""Export of stores to Megatron, flat files, Parquet, `datasets` folders and MDS shards.

Read `export_targets.py` first.
"""
