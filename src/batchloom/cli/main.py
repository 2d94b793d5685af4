"""The ``batchloom`` command: names brought along are understood, errors are one sentence."""

import errno
import os
import sys
from collections.abc import Sequence

import typer

from batchloom import __version__
from batchloom.cli.check import check
from batchloom.cli.datasets import datasets
from batchloom.cli.demo import demo
from batchloom.cli.inspect import inspect
from batchloom.cli.prepare import prepare
from batchloom.cli.train import train
from batchloom.core.errors import BatchloomError, SettingsError

# typer carries a click of its own in newer versions; what it raises is what it exports.
_Misuse: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

app = typer.Typer(
    name="batchloom",
    help="The training-data engine for language models: from files to the batches an accelerator eats.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (prepare, check, inspect, train, demo, datasets):
    app.command()(command)

# Options under the names that other tools' users have in their fingers.
_ALIASES: dict[str, list[str]] = {
    "--input-files": [],
    "--out-dir": ["--out"],
    "--tokenization": ["--tokenizer"],
    "--no-dedup": ["--dedup", "none"],
}


@app.callback(invoke_without_command=True)
def root(
    *,
    version: bool = typer.Option(False, "--version", help="Print the version and leave."),  # noqa: FBT003
) -> None:
    """The training-data engine for language models."""
    if version:
        print(f"batchloom {__version__}")
        raise typer.Exit


def familiar(arguments: Sequence[str]) -> list[str]:
    """Command-line words with underscores and brought-along names made ours.

    ``--tokens_per_shard`` becomes ``--tokens-per-shard``; the values after ``--input-files``
    become plain inputs; words after ``--`` stay as they are.
    """
    words: list[str] = []
    for place, word in enumerate(arguments):
        if word == "--":
            return [*words, *arguments[place:]]
        if not word.startswith("--"):
            words.append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        known = _ALIASES.get(name)
        if known is None:
            words.append(name + equals + value)
        else:
            words += known
            words += [value] if equals else []
    return words


def main() -> None:
    """Run the command line and leave with its exit code: 0 done, 1 failed, 2 misused."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    try:
        code = app(familiar(arguments), standalone_mode=False)
    except _Misuse as error:
        error.show()  # type: ignore[attr-defined]
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return _fail(
            "Stopped. What was finished is whole; give the same command again to go on.", 130
        )
    except SettingsError as error:
        return _fail("\n".join(error.problems), 2)
    except BatchloomError as error:
        return _fail(str(error), 1)
    except BrokenPipeError:
        # The reader of our output left (`| head`): not an error, but nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MemoryError:
        return _fail(
            "Out of memory. Give the job more, or smaller sizes (--batch-size, --seq-len).", 1
        )
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        name = errno.errorcode.get(error.errno or 0, "OSError")
        return _fail(f"The system refused: {error.strerror or error}{place} [{name}].", 1)
    return code if isinstance(code, int) else 0


def _fail(sentence: str, code: int) -> int:
    print(f"batchloom: {sentence}", file=sys.stderr)
    return code
