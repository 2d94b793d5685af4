"""The store: Megatron shards with a manifest, a tokenizer and the origin of each document."""
