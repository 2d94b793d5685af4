"""Batches: where a store and a plan meet."""
