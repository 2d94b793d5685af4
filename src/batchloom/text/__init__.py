"""Text: pure functions from a document's text to the text that is tokenized."""
