"""One small script per framework, run by the tests and ``batchloom compare``."""
