"""Documents on the pages: search, tokens, media and copies."""
