"""Preparing: from input files to a store, in units and phases that can stop and go on."""
