"""``batchloom compare``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from batchloom.analysis.compare import CompareSpec, compare_runs, read_loss_curve, require_compare_packages
from batchloom.cli.options import Argument, AsJson, Option, with_settings
from batchloom.cli.terminal import make_table, plain_console, print_json, print_note
from batchloom.core.addresses import is_url
from batchloom.core.errors import ExitCode, InputMissingError, SettingsError
from batchloom.core.files import describe_missing_path
from batchloom.core.settings import is_positive_number, raise_problems
from batchloom.core.synthetic_data import parse_synthetic_spec
from batchloom.core.wording import escape_unprintable

if TYPE_CHECKING:
    from batchloom.analysis.compare import AnyComparison

_RUN_ONLY_OPTIONS = ("tolerance",)


@with_settings(CompareSpec)
def compare(
    places: Annotated[
        list[str] | None,
        Argument(
            metavar="STORE|LOG",
            help="A store's folder or URL; with --runs the logs of finished runs.",
        ),
    ] = None,
    *,
    settings: dict[str, Any],
    runs: Annotated[
        bool,
        Option(
            "--runs",
            help="Compare finished runs by their logs, without running anything.",
            panel="Finished runs",
        ),
    ] = False,
    by: Annotated[
        Literal["step", "tokens"] | None,
        Option(
            help="Axis on which --runs compares.",
            show_default="step",
            panel="Finished runs",
        ),
    ] = None,
    out: Annotated[
        str, Option(help="Folder for compare.json, compare.png and compare.html; created if missing.")
    ] = "comparison",
    as_json: AsJson = False,
) -> ExitCode:
    """Compare one model in every framework: losses and speed.

    After a stop, the same command continues after the last framework that finished.

    Exit code 0: all agree, 1: a batch or a loss differs, or a framework failed, 2: wrong options.
    """
    if "frameworks" in settings:
        names = tuple(name.strip() for name in settings["frameworks"].split(",") if name.strip())
        if not names:
            raise SettingsError([f"frameworks: {settings['frameworks']!r} names none; leave it out for all"])
        settings["frameworks"] = names
    if not out:
        # Path("") would be the current folder.
        raise SettingsError(["out: '' is no folder; give one, such as comparison"])
    places = places or []
    comparison = (
        _compare_run_logs(places, settings, by) if runs else _compare_frameworks(places, settings, by, Path(out))
    )
    return _print_comparison(comparison, Path(out), as_json=as_json)


def _compare_frameworks(locations: list[str], settings: dict[str, Any], by: str | None, out: Path) -> "AnyComparison":
    if len(locations) > 1:
        for location in locations:
            if not (is_url(location) or parse_synthetic_spec(location) or _is_path(location)):
                remedy = "name a store, or with --runs the logs or the folders of runs"
                raise InputMissingError(describe_missing_path(location, remedy))
        raise SettingsError(
            [f"store: one is compared on, and {len(locations)} are given; --runs compares finished runs"]
        )
    if by is not None:
        raise SettingsError(["by: is of --runs; frameworks are compared step by step"])
    require_compare_packages()
    from batchloom.analysis.compare import compare as compare_frameworks  # noqa: PLC0415 - needs torch

    spec = CompareSpec(store=locations[0] if locations else None, **settings)
    return compare_frameworks(spec, print_note, out)


def _is_path(location: str) -> bool:
    """Return whether there is a file, a folder or a Megatron prefix of this name."""
    return Path(location).exists() or Path(f"{location}.idx").exists()


def _compare_run_logs(locations: list[str], settings: dict[str, Any], by: str | None) -> "AnyComparison":
    problems = [
        f"{name}: is of frameworks that are run; --runs reads what was"
        for name in settings
        if name not in _RUN_ONLY_OPTIONS
    ]
    if not locations:
        problems.append("runs: missing; give the logs or the folders of finished runs")
    if "tolerance" in settings and not is_positive_number(settings["tolerance"]):
        problems.append(f"tolerance: {settings['tolerance']} is no number above 0")
    raise_problems(problems)
    require_compare_packages()
    curves = [read_loss_curve(location) for location in locations]
    return compare_runs(curves, "tokens" if by == "tokens" else "step", settings.get("tolerance"))


def _print_comparison(comparison: "AnyComparison", out: Path, *, as_json: bool) -> ExitCode:
    from batchloom.analysis.compare import compare_report as report  # noqa: PLC0415 - needs torch

    files = report.write_comparison(comparison, out)
    if as_json:
        print_json(report.comparison_to_plain(comparison))
        return ExitCode.DONE if comparison.agree else ExitCode.FAILED
    console = plain_console()
    if comparison.synthetic:
        console.print(report.make_banner(comparison), style="bold red")
    columns, rows = report.list_columns(comparison), report.make_table_rows(comparison)
    table = make_table(columns, rows, title=report.make_title(comparison), framed=True)
    console.print(table, soft_wrap=False)
    for sentence in report.describe_comparison(comparison):
        console.print(escape_unprintable(sentence))
    console.print(report.describe_verdict(comparison), style="bold" if comparison.agree else "bold red")
    console.print(f"Written: {', '.join(str(file) for file in files)}")
    return ExitCode.DONE if comparison.agree else ExitCode.FAILED
