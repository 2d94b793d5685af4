"""Frameworks' own faces over the loader: translation only, one file a framework."""
