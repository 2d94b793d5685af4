"""Data of a training run: stores, mixtures, raw inputs, and synthetic fallbacks.

Read `dataset_run.py` first.
"""
