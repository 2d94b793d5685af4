"""The ``batchloom`` command from its first moment to its exit code.

What takes time to import is imported inside, so that a Ctrl-C finds an answer from the start.
"""

import io
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

_STOPPED_MESSAGE = "Stopped. What was finished is whole; give the same command again to go on."
_MEMORY_ADVICE = {
    "prepare": "Give it 1 GiB or more, or a tokenizer of a smaller vocabulary.",
    "train": "Give the job more, or smaller sizes (--batch-size, --seq-len).",
}
# These may wait for other ranks in native code, which no exception reaches.
_RANK_COMMANDS = (["train"], ["worker"])


def main() -> None:
    """Run the command line and leave with its exit code: 0 done, 1 failed, 2 misused, 129, 130 or 143 stopped."""
    # Where the shell has Ctrl-C ignored (nohup, &), it stays so.
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        # Modules that are being imported may take an exception for a missing package.
        signal.signal(signal.SIGINT, _exit_on_signal)
    _reopen_closed_streams()
    from batchloom.cli import commands  # noqa: F401, PLC0415 - takes its time

    # Paths may hold what the terminal's encoding cannot spell.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    code, ended = 130, list[int]()

    def end(number: int, frame: "FrameType | None") -> None:  # noqa: ARG001 - a handler's signature
        # As schedulers and containers stop a process.
        ended.append(number)
        raise KeyboardInterrupt

    try:
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # A terminal that is closed ends a job, too, unless it was told to stay (nohup).
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL and sys.argv[1:2] not in _RANK_COMMANDS:
                signal.signal(number, end)
        code = run_command_line(sys.argv[1:])
    except KeyboardInterrupt:
        # Between the lines of `run`, or a second one while it answers the first.
        _print_failure(_STOPPED_MESSAGE, code)
    finally:
        if heeded:
            signal.signal(signal.SIGINT, _exit_on_signal)
    _release_standard_streams()
    sys.exit(128 + ended[0] if ended and code == 130 else code)


def _release_standard_streams() -> None:
    """Leave nothing behind that the interpreter would try to print on its way out, and fail."""
    try:
        sys.stdout.flush()
    except OSError:
        # A full disk, or a reader that left: that was told.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reopen_closed_streams() -> None:
    """Open what was closed for us (``>&-``), so that no file of the job becomes standard output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The lowest number that is free is the one that was closed.
            null = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(null, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115, PTH123


def _exit_on_signal(number: int, frame: "FrameType | None") -> None:  # noqa: ARG001 - a handler's signature
    """End the process at once, where there is nothing to be tidied up."""
    os.write(2, f"batchloom: {_STOPPED_MESSAGE}\n".encode())
    os._exit(130)


def run_command_line(arguments: "Sequence[str]") -> int:
    """Run one command line; returns the exit code."""
    import errno  # noqa: PLC0415

    from batchloom.cli.commands import execute, name_options  # noqa: PLC0415 - takes its time
    from batchloom.cli.terminal import redact_urls  # noqa: PLC0415
    from batchloom.core.errors import BatchloomError, SettingsError  # noqa: PLC0415
    from batchloom.core.files import describe_os_error  # noqa: PLC0415

    try:
        code = execute(arguments)
        # What cannot be printed is told here rather than by the interpreter on its way out.
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _print_failure(_STOPPED_MESSAGE, 130)
    except SettingsError as error:
        problems = [name_options(problem, arguments) for problem in error.problems]
        return _print_failure(redact_urls("\n".join(problems), arguments), 2)
    except BatchloomError as error:
        return _print_failure(redact_urls(str(error), arguments), 1)
    except BrokenPipeError:
        # The reader of our output left (`| head`): not an error, but nothing more can be said.
        return 1
    except MemoryError:
        command = next((word for word in arguments if not word.startswith("-")), "")
        remedy = _MEMORY_ADVICE.get(command, "Give the job more.")
        return _print_failure(f"Out of memory. {remedy}", 1)
    except OSError as error:
        file_note = f" ({error.filename})" if error.filename else ""
        name = errno.errorcode.get(error.errno or 0, "OSError")
        sentence = f"The system refused{file_note} [{name}]: {describe_os_error(error)}."
        return _print_failure(redact_urls(sentence, arguments), 1)
    return code


def _print_failure(sentence: str, code: int) -> int:
    from batchloom.core.wording import escape_unprintable  # noqa: PLC0415

    # Names of files and columns, and what templates say, may hold commands for the terminal.
    printable = "\n".join(map(escape_unprintable, sentence.split("\n")))
    print(f"batchloom: {printable}", file=sys.stderr)
    return code
