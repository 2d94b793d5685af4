"""Streams: training on raw inputs, tokenized as they are needed."""
