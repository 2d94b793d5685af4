from .main import run as run
from .terminal.preview_output import preview_lines as preview_lines
