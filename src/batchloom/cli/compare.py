"""``batchloom compare``."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from batchloom.analysis.compare import CompareSpec, compare_runs, read_loss_curve, require_compare_packages
from batchloom.cli.options import Argument, AsJson, Option, with_settings
from batchloom.cli.terminal import Line, make_table, print_note, report
from batchloom.core.errors import ExitCode, SettingsError
from batchloom.core.settings import is_positive_number, raise_problems

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
        raise SettingsError(
            [f"store: one is compared on, and {len(locations)} are given; --runs compares finished runs"]
        )
    if by is not None:
        raise SettingsError(["by: is of --runs; frameworks are compared step by step"])
    require_compare_packages()
    from batchloom.analysis.compare import compare as compare_frameworks

    spec = CompareSpec(store=locations[0] if locations else None, **settings)
    return compare_frameworks(spec, print_note, out)


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
    from batchloom.analysis.compare import compare_report

    files = compare_report.write_comparison(comparison, out)
    report(compare_report.comparison_to_plain(comparison), _iter_lines(comparison, files), as_json=as_json)
    return ExitCode.DONE if comparison.agree else ExitCode.FAILED


def _iter_lines(comparison: "AnyComparison", files: Sequence[Path]) -> Iterator[Line]:
    from batchloom.analysis.compare import compare_report

    if comparison.synthetic:
        yield compare_report.make_banner(comparison), "bold red"
    columns = compare_report.list_columns(comparison)
    rows = compare_report.make_table_rows(comparison)
    yield make_table(columns, rows, title=compare_report.make_title(comparison), framed=True)
    yield from compare_report.describe_comparison(comparison)
    yield compare_report.describe_verdict(comparison), "bold" if comparison.agree else "bold red"
    yield f"Written: {', '.join(str(file) for file in files)}"
