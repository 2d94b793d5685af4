"""Sources: finding input files, cutting them into parts, reading parts as documents."""
