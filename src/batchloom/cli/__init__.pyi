from .doctor import make_preview_lines as make_preview_lines
from .main import run_command_line as run_command_line
