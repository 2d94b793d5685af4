"""Shell completion: real shells that load what ``--install-completion`` writes."""

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

from batchloom.cli import run_command_line
from batchloom.testing import write_store
from processes import ProcessResult
from waiting import LIMIT_S

SHELL_COMMANDS = {"bash": ["bash", "-i"], "zsh": ["zsh", "-i"], "fish": ["fish", "-i"]}
ESCAPE_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>()][0B]?|\x1b\][^\x07]*\x07|\x0f|\r")


def make_environment(home, shell="bash"):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "ZDOTDIR"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**inherited, "HOME": str(home), "PATH": path, "SHELL": f"/bin/{shell}", "TERM": "xterm"}


@pytest.fixture
def run_batchloom(monkeypatch, capfd):
    """Run a command with a home folder and a shell; return its exit code, output and errors."""

    def run(home, *words, shell="bash", variables=()):
        for name in [name for name in os.environ if name.startswith(("XDG_", "ZDOTDIR"))]:
            monkeypatch.delenv(name)
        for name, value in {**make_environment(home, shell), **dict(variables)}.items():
            monkeypatch.setenv(name, value)
        return ProcessResult(run_command_line(words), *capfd.readouterr())

    return run


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
def test_a_shell_completes_commands_options_choices_and_paths(tmp_path, shell, run_batchloom):
    skip_without_completion(shell)
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    write_store(folder / "my_store", [[1, 2, 3]])
    assert run_batchloom(home, "--install-completion", shell).returncode == 0
    with start_shell(shell, home, folder) as terminal:
        terminal.complete("batchloom insp", r"insp *ect")
        terminal.complete("batchloom inspect --spl", r"--spl *it")
        terminal.complete("batchloom inspect --split va", r"va *l ")
        terminal.complete("batchloom check my_st", r"my_st *ore")


@pytest.mark.parametrize(
    ("shell", "script", "start_file"),
    [
        ("bash", ".local/share/batchloom/completion.bash", ".bashrc"),
        ("zsh", ".local/share/batchloom/completion.zsh", ".zshrc"),
        ("fish", ".config/fish/completions/batchloom.fish", None),
    ],
)
def test_installing_twice_equals_installing_once(tmp_path, shell, script, start_file, run_batchloom):
    if shell == "bash":
        skip_without_completion(shell)
    if start_file:
        (tmp_path / start_file).write_text("alias ll='ls -l'")
    first, second = (run_batchloom(tmp_path, "--install-completion", shell=shell) for _ in range(2))
    assert (first.returncode, first.stderr) == (0, "")
    assert f"Wrote {tmp_path / script}.\n" in first.stdout
    assert (tmp_path / script).read_text() == run_batchloom(tmp_path, "--show-completion", shell).stdout
    if start_file:
        assert f"{tmp_path / start_file} loads it now.\n" in first.stdout
        assert f"{tmp_path / start_file} loads it already.\n" in second.stdout
        lines = (tmp_path / start_file).read_text().splitlines()
        assert lines[0] == "alias ll='ls -l'"
        assert len(lines) == 2


@pytest.mark.parametrize(
    ("words", "shell", "message"),
    [
        (
            ["--install-completion"],
            "tcsh",
            "--install-completion: SHELL is '/bin/tcsh'; completion supports bash, zsh and fish: name one of them\n",
        ),
        (["--show-completion"], "tcsh", "name one of them\n"),
        (["--install-completion", "tcsh"], "bash", "'tcsh' is not one of 'bash', 'zsh', 'fish'."),
    ],
)
def test_another_shell_is_refused(tmp_path, words, shell, message, run_batchloom):
    result = run_batchloom(tmp_path, *words, shell=shell)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_bash_before_4_4_is_refused(tmp_path, run_batchloom):
    bash = tmp_path / "bin" / "bash"
    bash.parent.mkdir()
    bash.write_text("#!/bin/sh\necho 3 2\n")
    bash.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    variables = {"PATH": f"{bash.parent}{os.pathsep}{os.environ['PATH']}"}
    for option in ("--install-completion", "--show-completion"):
        result = run_batchloom(home, option, variables=variables)
        assert (result.returncode, result.stdout) == (2, "")
        assert "bash has version 3.2, and completion needs 4.4; install a newer bash, or name zsh" in result.stderr
    assert list(home.iterdir()) == []


def test_a_missing_folder_of_the_start_file_is_made(tmp_path, run_batchloom):
    variables = {"ZDOTDIR": str(tmp_path / "new" / "zsh")}
    assert run_batchloom(tmp_path, "--install-completion", "zsh", variables=variables).returncode == 0
    assert "completion.zsh" in (tmp_path / "new" / "zsh" / ".zshrc").read_text()


def test_the_version_and_an_installation_may_be_combined(tmp_path, run_batchloom):
    result = run_batchloom(tmp_path, "--version", "--install-completion", "fish")
    assert result.returncode == 0
    assert result.stdout.startswith("batchloom ")
    assert (tmp_path / ".config/fish/completions/batchloom.fish").is_file()
