"""What tests of batchloom's users (and its own) are written with."""
