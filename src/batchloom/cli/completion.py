"""Completion of the command line in bash, zsh and fish."""

import os
import shlex
import sys
from pathlib import Path

from click.shell_completion import get_completion_class

from batchloom.cli.commands import APP, COMPLETE_VARIABLE, LOGIN_SHELL, SHELLS
from batchloom.cli.terminal import print_escaped
from batchloom.core.errors import SettingsError
from batchloom.core.settings import quote_value

# Lines that load a script at the start of a shell. compdef belongs to the completion system of zsh.
_BASH_LINE = "test ! -f {script} || . {script}"
_ZSH_LINE = "(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}; test ! -f {script} || . {script}"


def print_completion_script(shell: str) -> None:
    """Print the script that completes command lines of batchloom.

    Args:
        shell: bash, zsh, fish, or auto for the one in the variable SHELL.
    """
    sys.stdout.write(_make_script(_resolve_shell(shell)))


def install_completion(shell: str) -> None:
    """Write the completion script, and make the shell load it.

    A second call changes nothing. fish loads all scripts of one folder. bash and zsh get a line in their start file.

    Args:
        shell: bash, zsh, fish, or auto for the one in the variable SHELL.
    """
    shell = _resolve_shell(shell)
    if shell == "fish":
        script = _find_folder("XDG_CONFIG_HOME", ".config") / "fish" / "completions" / "batchloom.fish"
        start_file = None
    else:
        script = _find_folder("XDG_DATA_HOME", ".local/share") / "batchloom" / f"completion.{shell}"
        start_file = _find_folder("ZDOTDIR", "") / ".zshrc" if shell == "zsh" else Path.home() / ".bashrc"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(_make_script(shell), encoding="utf-8")
    print_escaped(f"Wrote {script}.")
    if start_file is not None:
        line = (_ZSH_LINE if shell == "zsh" else _BASH_LINE).format(script=shlex.quote(str(script)))
        added = _add_line(start_file, line)
        print_escaped(f"{start_file} {'loads it now' if added else 'loads it already'}.")
    print_escaped(f"Open a new {shell} to complete commands, options and files by the Tab key.")


def _resolve_shell(shell: str) -> str:
    if shell != LOGIN_SHELL:
        return shell
    path = os.environ.get("SHELL", "")
    if Path(path).name not in SHELLS:
        problem = f"{quote_value(path)} is none of {', '.join(SHELLS)}"
        raise SettingsError([f"the variable SHELL: {problem}; name the shell, as in --install-completion bash"])
    return Path(path).name


def _make_script(shell: str) -> str:
    completion = get_completion_class(shell)
    if completion is None:
        raise AssertionError(shell)
    return completion(APP, {}, "batchloom", COMPLETE_VARIABLE).source()


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
