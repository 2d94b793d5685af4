"""Completion of the command line in bash, zsh and fish."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from click.shell_completion import BashComplete, FishComplete, ZshComplete

from batchloom.cli.commands import APP, COMPLETE_VARIABLE
from batchloom.cli.terminal import print_escaped
from batchloom.core.errors import SettingsError

_COMPLETION_CLASSES = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
# Lines that load a script at the start of a shell. compdef belongs to the completion system of zsh.
_BASH_LINE = "test ! -f {script} || . {script}"
_ZSH_LINE = "(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}; test ! -f {script} || . {script}"


def print_completion_script(shell: str) -> None:
    """Print the script that completes command lines of batchloom.

    Args:
        shell: bash, zsh or fish.

    Raises:
        SettingsError: bash is too old.
    """
    sys.stdout.write(_make_script(shell))


def install_completion(shell: str) -> None:
    """Write the completion script, and make the shell load it.

    A second call changes nothing. fish loads all scripts of one folder. bash and zsh get a line in their start file.

    Args:
        shell: bash, zsh or fish.

    Raises:
        SettingsError: bash is too old.
    """
    content = _make_script(shell)
    if shell == "fish":
        script = _find_folder("XDG_CONFIG_HOME", ".config") / "fish" / "completions" / "batchloom.fish"
        start_file = None
    else:
        script = _find_folder("XDG_DATA_HOME", ".local/share") / "batchloom" / f"completion.{shell}"
        start_file = _find_folder("ZDOTDIR", "") / ".zshrc" if shell == "zsh" else Path.home() / ".bashrc"
    for file in filter(None, (script, start_file)):
        file.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(content, encoding="utf-8")
    print_escaped(f"Wrote {script}.")
    if start_file is not None:
        line = (_ZSH_LINE if shell == "zsh" else _BASH_LINE).format(script=shlex.quote(str(script)))
        added = _add_line(start_file, line)
        print_escaped(f"{start_file} {'loads it now' if added else 'loads it already'}.")
    print_escaped(f"Open a new {shell} to complete commands, options and files by the Tab key.")


def _make_script(shell: str) -> str:
    if shell == "bash":
        _check_bash_version()
    completion = _COMPLETION_CLASSES[shell]
    return completion(APP, {}, "batchloom", COMPLETE_VARIABLE).source()


def _check_bash_version() -> None:
    """Refuse a bash that lacks an option of the script: ``complete -o nosort``."""
    command = ["bash", "--norc", "-c", "echo ${BASH_VERSINFO[0]} ${BASH_VERSINFO[1]}"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603 - fixed words
    major, minor = map(int, output.split())
    if (major, minor) < (4, 4):
        raise SettingsError(
            [f"bash has version {major}.{minor}, and completion needs 4.4; install a newer bash, or name zsh"]
        )


def _find_folder(variable: str, default: str) -> Path:
    """Return the folder that a variable names, or its default in the home folder."""
    return Path(os.environ.get(variable) or Path.home() / default)


def _add_line(file: Path, line: str) -> bool:
    """Append a line to a text file; return False if the file has it already."""
    text = file.read_text("utf-8", errors="surrogateescape") if file.exists() else ""
    if line in text.splitlines():
        return False
    with file.open("a", encoding="utf-8") as lines:
        lines.write(f"{'' if not text or text.endswith(chr(10)) else chr(10)}{line}\n")
    return True
