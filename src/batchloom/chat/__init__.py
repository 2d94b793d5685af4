"""Chat templates: a conversation to its text, and where each turn stands in it."""
