"""From the columns of a record to conversations: pure functions of values, no files."""
