"""The commands and their options, with option aliases of other tools."""

import gc
import importlib
import inspect
import io
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, final

import click

from batchloom import __version__
from batchloom.cli.options import make_parameters
from batchloom.cli.terminal import redact_urls, show_load
from batchloom.core.errors import ExitCode, SettingsError
from batchloom.core.settings import find_nearest
from batchloom.core.slow_loads import set_load_display

# Functions of the commands with the summaries and examples of their help, the most used first. Importing all of them
# takes a second, so a function is imported when its command is called.
COMMANDS: dict[str, tuple[str, str, *tuple[str, ...]]] = {
    "doctor": (
        "doctor.doctor",
        "Inspect raw inputs: schema, lengths, faults, packing.",
        "batchloom doctor data.jsonl",
        "batchloom doctor data/ --tokenizer gpt2 --full",
    ),
    "prepare": (
        "prepare.prepare",
        "Prepare files into a store: tokenize, clean, deduplicate.",
        "batchloom prepare data/*.jsonl --out store",
        "batchloom prepare org/name --out store --workers 8",
        "batchloom prepare chats.jsonl --out store --template chatml --train-on assistant",
        "batchloom prepare new.jsonl --out store --append",
        "batchloom prepare --recipe recipe.yaml --out store",
        "batchloom prepare data/*.jsonl --out store --dry-run",
    ),
    "check": (
        "check.check",
        "Verify a store or raw file: real, synthetic or absent.",
        "batchloom check store",
        "batchloom check data.jsonl",
    ),
    "inspect": (
        "inspect.inspect",
        "Show the shards, lengths, packing and texts of a store.",
        "batchloom inspect store --split val",
        "batchloom inspect store --seq-len 4096 --json",
    ),
    "view": (
        "view.view",
        "Look at data, masks, packing, plans and runs in a browser.",
        "batchloom view store",
        "batchloom view data/*.jsonl",
        "batchloom view mixture.yaml --port 8080",
    ),
    "plan": (
        "plan.plan",
        "Forecast a run: steps, epochs, padding, mixture, hours.",
        "batchloom plan store --seq-len 4096 --global-batch-size 512",
        "batchloom plan --assume '15T tokens, 12B documents' --seq-len 4096 --global-batch-size 512",
        "batchloom plan store --checkpoint run",
    ),
    "train": (
        "train.train",
        "Train a small GPT, or finetune a pretrained model.",
        "batchloom train --data store --out run",
        "batchloom train --data store --out run --max-iters 2000 --resume",
        "batchloom train --mixture stores/web=0.7,stores/code=0.3 --init model --out run",
        "batchloom train --stream 'data/*.jsonl' --tokenizer gpt2 --out run",
        "torchrun --nproc-per-node 8 -m batchloom train --data store",
    ),
    "worker": (
        "train.worker",
        "Train as one worker of a run that others join and leave.",
        "batchloom worker --dataset-type dummy --num-steps 20",
        "torchrun --nnodes 1:8 -m batchloom worker --dataset-type store --dataset-name store --out run",
    ),
    "edit": (
        "edit.edit",
        "Change a run from a step on: weights, bans, sizes.",
        "batchloom edit run --mixture mix.yaml --at-step 1000 --weights web=0.5,code=0.5",
        "batchloom edit run --data store --at-step 1000 --ban 17,18 --dry-run",
    ),
    "explain": (
        "explain.explain",
        "Show the documents of a step, and where they come from.",
        "batchloom explain store --step 7 --seq-len 4096 --global-batch-size 512",
    ),
    "when": (
        "explain.when",
        "Show every step and row in which a document is served.",
        "batchloom when store --document 17 --seq-len 4096 --global-batch-size 512",
        "batchloom when store --checkpoint run --source data.jsonl --record 16",
    ),
    "compare": (
        "compare.compare",
        "Compare one model in every framework: losses and speed.",
        "batchloom compare store --frameworks pytorch,hf-trainer",
        "batchloom compare --runs run-a run-b",
    ),
    "convert": (
        "convert.convert",
        "Write the rows of any input as JSON Lines, JSON or Parquet.",
        "batchloom convert data.csv --out data.jsonl",
        "batchloom convert org/name --out - --columns text",
    ),
    "import": (
        "import_.import_",
        "Make a store around existing files of token ids.",
        "batchloom import megatron/train --out store --tokenizer gpt2",
        "batchloom import ids.bin --out store --dtype uint16 --eod 50256 --tokenizer gpt2",
    ),
    "export": (
        "export.export",
        "Write a store in a form that other tools read.",
        "batchloom export store --to parquet --out exported",
        "batchloom export store --to flat --out flat",
    ),
    "upload": (
        "upload.upload",
        "Upload a finished store to an object store.",
        "batchloom upload store s3://bucket/store",
    ),
    "log": (
        "generations.log",
        "List the generations of a store.",
        "batchloom log store",
    ),
    "remove": (
        "generations.remove",
        "Remove documents from a store, in its next generation.",
        "batchloom remove store --source 'web/*' --dry-run",
        "batchloom remove store --documents-file list.txt",
    ),
    "compact": (
        "generations.compact",
        "Delete removed documents and older generations for good.",
        "batchloom compact store",
    ),
    "datasets": (
        "prepare.datasets",
        "List the data sets with a short name, which prepare takes.",
        "batchloom datasets",
    ),
    "demo": (
        "train.demo",
        "Prepare, train and sample real text, in three minutes.",
        "batchloom demo --out demo --steps 100",
    ),
}
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
    "template_args": "--template-arg",
    "steps": "--max-iters",
    "step": "--at-step",
    "optim.lr": "--lr",
    "model.init": "--init",
    "tokenizer_name": "--tokenizer",
}
# Options of other programs, and the one of ours that is meant where a command has it.
_OTHER_OPTIONS = {
    **dict.fromkeys(("--num-proc", "--num-workers"), "--workers"),
    **dict.fromkeys(("--text-column", "--json-keys", "--text-key"), "--text-field"),
    **dict.fromkeys(("--max-steps", "--steps", "--train-iters", "--epochs"), "--max-iters"),
    "--learning-rate": "--lr",
    "--output-dir": "--out",
}
# Options that take several names.
_LIST_OPTIONS = frozenset(("carry", "clean", "exclude", "ignore", "include"))
# Variable by which a shell asks for completions.
COMPLETE_VARIABLE = "_BATCHLOOM_COMPLETE"
# A default that is described in words, which click puts in parentheses.
_DESCRIBED_DEFAULT = re.compile(r"\[default: \((.*)\)(?=[;\]])")


@final
class SectionedCommand(click.Command):
    """A command whose help has sections, and which rejects repeated options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options by section, the command's own first."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                title = "Arguments" if param.param_type_name == "argument" else "Options"
                records = sections.setdefault(getattr(param, "panel", None) or title, [])
                records.append((record[0], _DESCRIBED_DEFAULT.sub(r"[default: \1", record[1])))
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, one a line."""
        with formatter.section("Examples"):
            for example in (self.epilog or "").splitlines():
                formatter.write(f"  {example}\n")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; reject a repeated option, since click takes the last value."""
        if ctx.resilient_parsing:
            # A shell completes the line.
            return super().parse_args(ctx, args)
        try:
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        except click.NoSuchOption as error:
            options = [option for param in self.get_params(ctx) for option in param.opts]
            hint = _describe_other_option(error.option_name, options)
            raise click.UsageError(f"No such option {error.option_name!r}.{hint}", ctx) from error
        counts: Counter[Any] = Counter(param for param in order if param.param_type_name == "option")
        for param, times in counts.items():
            if times > 1 and not (param.multiple or param.count or param.is_eager):
                name = max(param.opts, key=len)
                separated = ", with commas between several names" if param.name in _LIST_OPTIONS else ""
                problem = f"it is given {times} times, and has one value: give it once{separated}"
                raise click.BadParameter(problem, param_hint=name)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, with the garbage collector that `main` disabled."""
        if not gc.isenabled():
            # Modules stay until the end: collections need not search them.
            gc.freeze()
            gc.enable()
        return super().invoke(ctx)


def _describe_other_option(name: str, options: Sequence[str]) -> str:
    """Return what to give in place of an option that a command does not have."""
    meant = _OTHER_OPTIONS.get(name)
    # Without the dashes, which all options share: with them, --epochs would be like --processor.
    nearest = find_nearest(name.lstrip("-"), [option.lstrip("-") for option in options])
    if meant not in options:
        meant = next((option for option in options if option.lstrip("-") == nearest), None)
    if meant is not None:
        return f" Did you mean {meant!r}?"
    owners = [owner for owner in COMMANDS if any(name in param.opts for param in load_command(owner).params)]
    return f" It is an option of {', '.join(owners)}." if owners else ""


def load_command(name: str) -> click.Command:
    """Import a command and read its options."""
    function_path, _, *examples = COMMANDS[name]
    module_name, _, function_name = function_path.partition(".")
    function = getattr(importlib.import_module(f"batchloom.cli.{module_name}"), function_name)
    return SectionedCommand(
        name,
        callback=function,
        params=make_parameters(function),
        help=inspect.getdoc(function),
        epilog="\n".join(examples),
    )


@final
class LazyGroup(click.Group):
    """The group of all commands, which knows their names and summaries."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, the most used first."""
        return list(COMMANDS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and its arguments."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and load_command(name), rest


def _run_group_options(*, version: bool) -> None:
    if version:
        print(f"batchloom {__version__}")
        raise click.exceptions.Exit


APP = LazyGroup(
    name="batchloom",
    help="The training-data engine for language models: from raw files to training batches.",
    commands={name: click.Command(name, help=entry[1]) for name, entry in COMMANDS.items()},
    params=[
        click.Option(["--version"], is_flag=True, help="Print the version and exit."),
    ],
    callback=_run_group_options,
    invoke_without_command=True,
    no_args_is_help=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


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
    """Replace the setting in a problem by its option, if that is given or missing."""
    name, colon, fault = problem.partition(":")
    names = (_OPTIONS.get(name), f"--{name.rpartition('.')[2].replace('_', '-')}")
    # A setting that is not on the command line may be that of a file, unless it is missing.
    options = {word.partition("=")[0] for word in normalize_arguments(arguments)}
    if fault.startswith(" missing") and "." not in name and arguments and arguments[0] in COMMANDS:
        options |= {option for parameter in load_command(arguments[0]).params for option in parameter.opts}
    return next((option + colon + fault for option in names if option in options), problem)


# A call in Python code, whose arguments stay as they are, or a setting in its spelling that is no part of a path.
_PYTHON_SETTING = re.compile(r"\w\([^()]*\)|(?<![\w./=-])([a-z_]+)='([a-z_]+)'(?![\w./=-])")


def spell_options(sentence: str, arguments: Sequence[str]) -> str:
    """Replace settings in the spelling of Python by options of the command."""
    if not _PYTHON_SETTING.search(sentence) or not arguments or arguments[0] not in COMMANDS:
        return sentence
    options = {option for parameter in load_command(arguments[0]).params for option in parameter.opts}

    def spell(found: re.Match[str]) -> str:
        option = f"--{found[1].replace('_', '-')}" if found[1] else ""
        return f"{option} {found[2]}" if option in options else found[0]

    return _PYTHON_SETTING.sub(spell, sentence)


def execute(arguments: Sequence[str]) -> ExitCode:
    """Run a command line and return its exit code."""
    if instruction := os.environ.get(COMPLETE_VARIABLE):
        from click.shell_completion import shell_complete

        return ExitCode(shell_complete(APP, {}, "batchloom", COMPLETE_VARIABLE, instruction))
    set_load_display(show_load)
    # Not `APP(...)`: click would convert KeyboardInterrupt to an exit; `main` handles it.
    try:
        with APP.make_context("batchloom", normalize_arguments(arguments)) as context:
            code = APP.invoke(context)
    except click.ClickException as error:
        if isinstance(error, click.BadParameter) and error.message:
            name = error.param_hint or (max(error.param.opts, key=len) if error.param else "command")
            raise SettingsError([f"{name}: {error.message}"]) from error
        text = io.StringIO()
        error.show(text)
        sys.stderr.write(redact_urls(text.getvalue(), arguments))
        return ExitCode.USAGE
    except click.exceptions.Exit as leave:
        return ExitCode(leave.exit_code)
    return code if isinstance(code, ExitCode) else ExitCode.DONE
