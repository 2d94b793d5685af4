"""Finding duplicates in bounded memory: keys are sorted and kept in files."""
