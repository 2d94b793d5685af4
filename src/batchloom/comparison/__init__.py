"""Whether trainers are given the same batches: what reached the model, told by hooks, and compared."""
