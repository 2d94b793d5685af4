from .import_settings import How as How, ImportSpec as ImportSpec
from .token_import import run_import as run_import
from .token_pass import Stretch as Stretch, hash_ids as hash_ids
