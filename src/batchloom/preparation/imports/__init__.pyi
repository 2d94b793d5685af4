from .import_settings import ImportSpec as ImportSpec, LinkMode as LinkMode
from .token_import import run_import as run_import
from .token_pass import TokenBatch as TokenBatch, hash_ids as hash_ids
