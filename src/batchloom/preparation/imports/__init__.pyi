from .import_settings import ImportSpec as ImportSpec, LinkMode as LinkMode
from .token_import import run_import as run_import
