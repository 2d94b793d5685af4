"""One small script a framework, as a user would write it; the tests and ``batchloom compare`` run them."""
