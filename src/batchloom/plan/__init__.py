"""From lengths to spans by integer arithmetic: no files, clocks, environment or torch."""
