"""The commands and their options, with option aliases of other tools."""

from collections.abc import Sequence

import typer

from batchloom import __version__
from batchloom.cli.check import check
from batchloom.cli.compare import compare
from batchloom.cli.convert import convert
from batchloom.cli.datasets import datasets
from batchloom.cli.demo import demo
from batchloom.cli.doctor import doctor
from batchloom.cli.edit import edit
from batchloom.cli.explain import explain, when
from batchloom.cli.export import export
from batchloom.cli.generations import compact, log, remove
from batchloom.cli.import_ import import_
from batchloom.cli.inspect import inspect
from batchloom.cli.plan import plan
from batchloom.cli.prepare import prepare
from batchloom.cli.terminal.option_once import SingleOptionCommand
from batchloom.cli.terminal.secrets import redact_urls
from batchloom.cli.train import train
from batchloom.cli.worker import worker

# Newer versions of typer vendor click; the exceptions it raises are those it exports.
_UsageError: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    name="batchloom",
    help="The training-data engine for language models: from files to the batches an accelerator eats.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Order of the help: the most used commands first.
for command in (
    *(doctor, prepare, check, inspect, plan, train, worker),
    *(edit, explain, when, compare, convert),
):
    app.command(cls=SingleOptionCommand)(command)
app.command("import", cls=SingleOptionCommand)(import_)
for last in (export, log, remove, compact, datasets, demo):
    app.command(cls=SingleOptionCommand)(last)

# Option names of other tools.
_ALIASES: dict[str, list[str]] = {
    "--input-files": [],
    "--out-dir": ["--out"],
    "--tokenization": ["--tokenizer"],
    "--no-dedup": ["--dedup", "none"],
    "--dataset-dir": ["--data"],
    "--dataset": [],
    "--csv": [],
    "--output": ["--out"],
}
# Settings with another option name.
_OPTIONS = {
    "memory": "--memory-per-worker",
    "steps": "--max-iters",
    "optim.lr": "--lr",
    "model.init": "--init",
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


def normalize_arguments(arguments: Sequence[str]) -> list[str]:
    """Convert underscores and option aliases of other tools to this command line.

    ``--tokens_per_shard`` becomes ``--tokens-per-shard``; the values after ``--input-files``
    become plain inputs; words after ``--`` stay unchanged.
    """
    words: list[str] = []
    for index, word in enumerate(arguments):
        if word == "--":
            return [*words, *arguments[index:]]
        if not word.startswith("--"):
            words.append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        alias_words = _ALIASES.get(name)
        if alias_words is None:
            words.append(name + equals + value)
        else:
            words += alias_words
            words += [value] if equals else []
    return words


def name_options(problem: str, arguments: Sequence[str]) -> str:
    """Replace the setting in a problem by its option, if that is on the command line."""
    name, colon, fault = problem.partition(":")
    option = _OPTIONS.get(name) or f"--{name.rpartition('.')[2].replace('_', '-')}"
    typed = {word.partition("=")[0] for word in normalize_arguments(arguments)}
    return option + colon + fault if option in typed else problem


def execute(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code.

    Raises:
        Exception: any error of the command; only wrong usage is handled here.
    """
    # Not `app(...)`: typer would convert KeyboardInterrupt to an exit; `main` handles it.
    command = typer.main.get_command(app)
    try:
        with command.make_context("batchloom", normalize_arguments(arguments)) as context:
            code = command.invoke(context)
    except _UsageError as error:
        error.message = redact_urls(error.message, arguments)  # type: ignore[attr-defined]
        error.show()  # type: ignore[attr-defined]
        return 2
    except typer.Exit as leave:
        return leave.exit_code
    return code if isinstance(code, int) else 0
