"""Shell completion: real shells, with the lines that the reference names."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchloom.testing import write_store
from waiting import LIMIT_S

CLI_PAGE = Path(__file__).parents[2] / "docs/reference/cli.md"
SHELL_COMMANDS = {"bash": ["bash", "-i"], "zsh": ["zsh", "-i"], "fish": ["fish", "-i"]}
ESCAPE_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>()][0B]?|\x1b\][^\x07]*\x07|\x0f|\r")


def make_environment(home, shell="bash"):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "ZDOTDIR"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**inherited, "HOME": str(home), "PATH": path, "SHELL": f"/bin/{shell}", "TERM": "xterm"}


def skip_without_completion(shell):
    """Skip a test if a shell is missing, or if it is a bash before 4.4, as on macOS."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    if shell == "bash":
        words = ["bash", "--norc", "-c", "echo ${BASH_VERSINFO[0]} ${BASH_VERSINFO[1]}"]
        version = tuple(map(int, subprocess.run(words, capture_output=True, check=True).stdout.split()))
        if version < (4, 4):
            pytest.skip(f"bash has version {version}")


class Terminal:
    """An interactive shell in a terminal of its own."""

    def __init__(self, descriptor):
        self.descriptor, self.output = descriptor, ""

    def send(self, text):
        os.write(self.descriptor, text.encode())

    def wait_for(self, pattern):
        """Read until a pattern occurs; return and forget the output up to its end."""
        deadline = time.monotonic() + LIMIT_S
        while not (match := re.search(pattern, ESCAPE_CODE.sub("", self.output))):
            remaining_s = deadline - time.monotonic()
            assert remaining_s > 0, f"{pattern!r} is not in {self.output!r}"
            if select.select([self.descriptor], [], [], remaining_s)[0]:
                self.output += os.read(self.descriptor, 1 << 16).decode(errors="replace")
        text = ESCAPE_CODE.sub("", self.output)
        self.output = text[match.end() :]
        return text[: match.end()]

    def complete(self, line, pattern):
        """Type a line and the Tab key, and wait for a pattern; then erase the line."""
        self.send(line + "\t")
        text = self.wait_for(pattern)
        self.send("\x15")
        return text


@contextmanager
def start_shell(shell, home, folder):
    process, descriptor = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe(shell, SHELL_COMMANDS[shell], make_environment(home, shell))
    terminal = Terminal(descriptor)
    try:
        terminal.send("echo re''ady\r")
        terminal.wait_for(r"(?m)^ready")
        yield terminal
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(descriptor)


@pytest.mark.parametrize("shell", ["bash", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zsh", "fish"))])
def test_a_shell_completes_commands_options_choices_and_paths(tmp_path, shell):
    skip_without_completion(shell)
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    write_store(folder / "my_store", [[1, 2, 3]])
    (line,) = re.findall(rf"`(.*={shell}_source .*)`", CLI_PAGE.read_text())
    with start_shell(shell, home, folder) as terminal:
        terminal.send(
            f"autoload -Uz compinit && compinit -u; {line}; echo load''ed\r"
            if shell == "zsh"
            else f"{line}; echo load''ed\r"
        )
        terminal.wait_for(r"(?m)^loaded")
        terminal.complete("batchloom insp", r"insp *ect")
        terminal.complete("batchloom inspect --spl", r"--spl *it")
        terminal.complete("batchloom inspect --split va", r"va *l ")
        terminal.complete("batchloom check my_st", r"my_st *ore")
