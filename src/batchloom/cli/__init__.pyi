from .main import run as run
from .preview import preview_lines as preview_lines
