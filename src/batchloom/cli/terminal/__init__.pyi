from .console import plain_console as plain_console
from .option_once import SingleOptionCommand as SingleOptionCommand
from .preview_output import print_preview as print_preview
from .profile_output import print_profile as print_profile
from .secrets import redact_urls as redact_urls
