"""Write docs/reference/cli.md: the commands, their options and the exit codes."""

import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from batchloom.cli.commands import APP, COMMANDS, load_command
from batchloom.cli.options import QUIET
from batchloom.core.errors import ExitCode

# An option in a sentence. As code it keeps its two hyphens, which a page may replace by a dash.
_OPTION_PATTERN = re.compile(r"(?<![\w`-])--[a-z][a-z-]*")
PAGE = Path(__file__).parent / "reference" / "cli.md"
_HEADER = """# Command line

`batchloom` and `python -m batchloom` are the same command. `batchloom COMMAND --help` prints the options below.
`python docs/write_cli_page.py` writes this page from the declarations of the commands.
"""
_OUTPUT = """## Output

Commands print their result on standard output, and progress, notes, warnings and errors on standard error.
`demo`, `train` and `worker` print their progress on standard output too; with `--json` it goes to standard error.

- `--json` prints the result as one JSON document on one line. Standard output holds nothing else.
- `NO_COLOR=1` removes colors. `FORCE_COLOR=1` keeps them in a pipe. `TERM=dumb` removes colors and redrawn lines.
- An underscore in the name of an option reads as a hyphen: `--seq_len` is `--seq-len`.
"""
_COMPLETION = """## Shell completion

`batchloom --install-completion` completes commands, options, choices and file names by the Tab key.
A second call changes nothing.

| shell | script | loaded by |
|---|---|---|
| bash, from 4.4 | `~/.local/share/batchloom/completion.bash` | a line in `~/.bashrc` |
| zsh | `~/.local/share/batchloom/completion.zsh` | a line in `~/.zshrc` |
| fish | `~/.config/fish/completions/batchloom.fish` | fish |

`XDG_DATA_HOME`, `XDG_CONFIG_HOME` and `ZDOTDIR` replace the folders `~/.local/share`, `~/.config` and `~`.
"""


def format_page() -> str:
    """Return the complete page."""
    context = click.Context(APP, info_name="batchloom", **APP.context_settings)
    general_options = [*APP.get_params(context), QUIET]
    commands = [(f"[`{name}`](#batchloom-{name})", entry[1]) for name, entry in COMMANDS.items()]
    codes = [(str(int(code)), code.meaning) for code in ExitCode]
    sections = [
        _HEADER,
        _format_table(("command", "result"), commands),
        "## General options\n",
        "`-q` and `-h` follow the name of any command, as in `batchloom check store -q`. The others stand alone.\n",
        _format_options(context, general_options),
        _OUTPUT,
        "## Exit codes\n",
        _format_table(("code", "meaning"), codes),
        _COMPLETION,
        *map(_format_command, COMMANDS),
    ]
    return "\n".join(sections)


def _format_command(name: str) -> str:
    command = load_command(name)
    context = click.Context(command, info_name=f"batchloom {name}")
    shown = [param for param in command.params if param is not QUIET]
    arguments = [param for param in shown if isinstance(param, click.Argument)]
    options = [param for param in shown if isinstance(param, click.Option)]
    usage = " ".join([context.info_name or "", *command.collect_usage_pieces(context)])
    parts = [
        f"## batchloom {name}\n",
        f"{_mark_options(inspect.cleandoc(command.help or ''))}\n",
        _format_block("text", [usage]),
    ]
    if arguments:
        parts.append(
            _format_table(("argument", "meaning"), [_describe_argument(param, context) for param in arguments])
        )
    # Options without a heading come first, as in the help text.
    for panel in dict.fromkeys([None, *(getattr(option, "panel", None) for option in options)]):
        members = [option for option in options if getattr(option, "panel", None) == panel]
        if members:
            parts += [f"**{panel}**\n"] * (panel is not None)
            parts.append(_format_options(context, members))
    parts.append(_format_block("sh", (command.epilog or "").splitlines()))
    return "\n".join(parts)


def _describe_argument(param: click.Argument, context: click.Context) -> tuple[str, str]:
    placeholder, help_text = param.get_help_record(context) or ("", "")
    return f"`{placeholder}`", _mark_options(help_text.replace("  [required]", " Required."))


def _format_options(context: click.Context, options: Iterable[click.Parameter]) -> str:
    rows = [
        (
            _format_names(option),
            _format_value(option),
            _mark_options(_format_default(option, context)),
            _mark_options(option.help or ""),
        )
        for option in options
        if isinstance(option, click.Option)
    ]
    return _format_table(("option", "value", "default", "meaning"), rows)


def _format_names(option: click.Option) -> str:
    return ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])


def _format_value(option: click.Option) -> str:
    if option.is_flag:
        return ""
    return ", ".join(f"`{word}`" for word in (option.metavar or "").strip("[]").split("|"))


def _format_default(option: click.Option, context: click.Context) -> str:
    if option.required:
        return "required"
    default = option.get_help_extra(context).get("default", "")
    # click puts a default that is described in words in parentheses.
    return default[1:-1] if default.startswith("(") else default


def _mark_options(sentence: str) -> str:
    return _OPTION_PATTERN.sub(r"`\g<0>`", sentence)


def _format_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(map(_escape_cell, row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _escape_cell(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*").replace("<", r"\<")


def _format_block(language: str, lines: Sequence[str]) -> str:
    return f"```{language}\n" + "".join(f"{line}\n" for line in lines) + "```\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(format_page())
