"""Entry point of the ``batchloom`` command, its signal handlers and exit codes.

Slow imports are inside functions, so that Ctrl-C is handled from the start.
"""

import gc
import io
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from batchloom.core.errors import ExitCode

# These commands write nothing that a stop could leave behind.
_READ_ONLY_COMMANDS = ("doctor", "check", "inspect", "plan", "explain", "when", "compare", "log", "view", "datasets")
_MEMORY_ADVICE = {
    "prepare": "Give it 1 GiB or more, or a tokenizer of a smaller vocabulary.",
    "train": "Give the job more, or smaller sizes (--batch-size, --seq-len).",
}
# These commands may wait for other ranks in native code, which exceptions do not interrupt.
_RANK_COMMANDS = (["train"], ["worker"])


def main() -> None:
    """Run the command line and exit with its code."""
    # Searching modules for cycles takes a tenth of a short command. `SectionedCommand` enables the collector again.
    gc.disable()
    # If the shell ignores Ctrl-C (nohup, &), keep it ignored.
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        # Modules may take an exception during their import for a missing package.
        signal.signal(signal.SIGINT, _exit_on_signal)
    _reopen_closed_streams()
    from batchloom.cli import commands  # noqa: F401 - slow import
    from batchloom.core.errors import ExitCode

    # Paths may have characters that the terminal's encoding lacks.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    code = ExitCode.INTERRUPTED
    ended = list[int]()

    def end(number: int, frame: "FrameType | None") -> None:  # noqa: ARG001 - a handler's signature
        # Schedulers and containers stop a process by SIGTERM.
        ended.append(number)
        raise KeyboardInterrupt

    try:
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # Closing the terminal ends the job, unless SIGHUP is ignored (nohup).
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL and sys.argv[1:2] not in _RANK_COMMANDS:
                signal.signal(number, end)
        code = run_command_line(sys.argv[1:])
    except KeyboardInterrupt:
        # A signal may arrive outside `run_command_line`, or a second one during its handling.
        _print_failure(_describe_stop(sys.argv[1:]), code)
    finally:
        if heeded:
            signal.signal(signal.SIGINT, _exit_on_signal)
    _release_standard_streams()
    # The system frees the memory: searching all objects for cycles at exit takes 0.05 to 0.2 s.
    gc.freeze()
    sys.exit(ExitCode(128 + ended[0]) if ended and code is ExitCode.INTERRUPTED else code)


def _release_standard_streams() -> None:
    """Detach standard streams that cannot be flushed, so that exit prints no error."""
    try:
        sys.stdout.flush()
    except OSError:
        # A full disk or a closed pipe has already been reported.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reopen_closed_streams() -> None:
    """Open closed standard streams (``>&-``), so that no job file becomes stdout."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # os.open returns the lowest free descriptor, which is the closed one.
            null = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(null, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115, PTH123


def _exit_on_signal(number: int, frame: "FrameType | None") -> None:  # noqa: ARG001 - a handler's signature
    """Exit at once; nothing needs cleanup yet."""
    os.write(2, f"batchloom: {_describe_stop(sys.argv[1:])}\n".encode())
    os._exit(128 + number)


def _describe_stop(arguments: "Sequence[str]") -> str:
    if arguments and arguments[0] in _READ_ONLY_COMMANDS:
        return "Stopped."
    return "Stopped. What was finished is whole; give the same command again to go on."


def run_command_line(arguments: "Sequence[str]") -> "ExitCode":
    """Run one command line and return its exit code."""
    import errno

    from batchloom.cli.commands import execute, name_options, spell_options
    from batchloom.cli.terminal import redact_urls
    from batchloom.core.errors import BatchloomError, ExitCode, SettingsError
    from batchloom.core.files import describe_os_error

    try:
        code = execute(arguments)
        # Flush here: the interpreter's flush at exit would print a traceback.
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _print_failure(_describe_stop(arguments), ExitCode.INTERRUPTED)
    except SettingsError as error:
        problems = [spell_options(name_options(problem, arguments), arguments) for problem in error.problems]
        return _print_failure(redact_urls("\n".join(problems), arguments), ExitCode.USAGE)
    except BatchloomError as error:
        return _print_failure(redact_urls(spell_options(str(error), arguments), arguments), ExitCode.FAILED)
    except BrokenPipeError:
        # The reader closed the pipe (`| head`): no error, but no more output is possible.
        return ExitCode.FAILED
    except MemoryError:
        command = next((word for word in arguments if not word.startswith("-")), "")
        remedy = _MEMORY_ADVICE.get(command, "Give the job more.")
        return _print_failure(f"Out of memory. {remedy}", ExitCode.FAILED)
    except OSError as error:
        file_note = f" ({error.filename})" if error.filename else ""
        name = errno.errorcode.get(error.errno or 0, "OSError")
        sentence = f"The system refused{file_note} [{name}]: {describe_os_error(error)}."
        return _print_failure(redact_urls(sentence, arguments), ExitCode.FAILED)
    return code


def _print_failure(sentence: str, code: "ExitCode") -> "ExitCode":
    from batchloom.core.wording import escape_unprintable

    # File names, column names and template errors may contain terminal escape codes.
    printable = "\n".join(map(escape_unprintable, sentence.split("\n")))
    print(f"batchloom: {printable}", file=sys.stderr)
    return code
