from .token_import import ImportSpec as ImportSpec, LinkMode as LinkMode, run_import as run_import
