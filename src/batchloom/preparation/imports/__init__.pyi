from .import_spec import ImportSpec as ImportSpec, LinkMode as LinkMode
from .token_files import list_import_options as list_import_options
from .token_import import import_tokens as import_tokens, run_import as run_import
