"""The command line: options and printing; the work is done by the functions it calls."""
