"""``batchloom edit``: changes to a run from a given step."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from batchloom import Edit
from batchloom.analysis import parse_weights
from batchloom.batches import read_mixture
from batchloom.cli.options import Argument, AsJson, DryRun, Option
from batchloom.cli.terminal import print_escaped, print_note, report, show_load
from batchloom.core.errors import ExitCode, SettingsError
from batchloom.core.settings import quote_value
from batchloom.core.wording import format_count
from batchloom.core.yaml_reader import parse_yaml
from batchloom.train import EDIT_TIMEOUT_S, require_train_packages

if TYPE_CHECKING:
    from batchloom.train import EditResult

_MAX_LISTED = 20


def edit(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of the run, or of one of its checkpoints.")],
    *,
    at_step: Annotated[
        int,
        Option(help="First step with the change, from 0; checkpoint 40 continues with step 40."),
    ],
    data: Annotated[
        str | None, Option(help="Store of a run on one store: a folder or a URL.", show_default="the one it recorded")
    ] = None,
    mixture: Annotated[
        str | None,
        Option(
            help="Mixture of the run, in the form train takes it; add a store without a weight: a=1,new.",
            show_default="the one it recorded",
        ),
    ] = None,
    generation: Annotated[
        int | None, Option(help="Generation of the store at --data.", show_default="the one the run started on")
    ] = None,
    weights: Annotated[
        str | None,
        Option(
            help="New weights of all sources: web=0.5,code=0.5, size, or a YAML mapping in braces.",
            show_default="unchanged",
        ),
    ] = None,
    skip: Annotated[int, Option(help="Number of steps to leave out.")] = 0,
    ban: Annotated[
        list[str] | None,
        Option(
            metavar="SOURCE:NUMBERS",
            help="Documents to replace by padding: web:17,18, or 17,18 in a run on one store. Repeatable.",
        ),
    ] = None,
    documents_file: Annotated[
        Path | None,
        Option(
            help="Documents to replace by padding, in the form that remove --documents-file takes: hashes, or sources "
            "and records; in a run on one store also numbers."
        ),
    ] = None,
    global_batch_size: Annotated[
        int | None, Option(help="New number of sequences of a step over all ranks.", show_default="unchanged")
    ] = None,
    seq_len: Annotated[int | None, Option(help="New number of tokens of a sequence.", show_default="unchanged")] = None,
    note: Annotated[str, Option(help="Reason for the change, for the journal.")] = "",
    wait: Annotated[
        float, Option(minimum=0, help="Seconds to wait for the answer of a run that is training, at least 0.")
    ] = EDIT_TIMEOUT_S,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> ExitCode | None:
    """Change a run from a step on: weights, bans, sizes.

    Steps may also be left out. The change is added to the journal in the run's newest checkpoint, and train --resume
    applies it. A run that is training receives it, and applies or refuses it between two steps.
    """
    require_train_packages()
    with show_load("torch"):
        from batchloom.train import edit_run, find_banned_documents, find_recorded_data, find_run

    folder = find_run(run)
    if data is not None and mixture is not None:
        raise SettingsError(["--data: give either --data or --mixture, what the run was started on"])
    run_data: Any = data if mixture is None else read_mixture(mixture)
    if run_data is None:
        run_data = find_recorded_data(folder)
    bans = _parse_bans(ban or [])
    if documents_file is not None:
        listed = find_banned_documents(run, run_data, documents_file, generation=generation, print_line=print_note)
        for name, numbers in listed.items():
            bans.setdefault(name, []).extend(numbers)
    requested_edit = Edit(
        step=at_step,
        weights=None if weights is None else _parse_weights(weights),
        skip=skip,
        ban=bans,
        global_batch_size=global_batch_size,
        seq_len=seq_len,
        note=note,
    )
    try:
        result = edit_run(
            *(run, run_data, requested_edit),
            generation=generation,
            dry_run=dry_run,
            patience=wait,
            print_line=print_note,
        )
    except KeyboardInterrupt:
        stop = f"Stopped. If the run had received the edit, {run / 'edits'} holds it and the answer."
        print_escaped(stop, stderr=True)
        return ExitCode.INTERRUPTED
    report(result, _iter_result_lines(result, at_step), as_json=as_json)
    return None


def _iter_result_lines(result: "EditResult", at_step: int) -> Iterator[str]:
    yield from (f"- {line}" for line in result.before if line not in result.after)
    yield from (f"+ {line}" if line not in result.before else f"  {line}" for line in result.after)
    yield json.dumps(_summarize_entry(result.entry), ensure_ascii=False)
    journal_location = f"{result.checkpoint} (edit {result.number} of its journal)"
    if result.checkpoint is None:
        yield (
            f"Accepted by the run: it applies after {format_count(at_step, 'step')} (edit {result.number} of its "
            f"journal, fingerprint {result.entry['fingerprint']}), and its next checkpoint records it."
        )
        return
    yield f"{'Written' if result.written else 'Would be written'} to {journal_location}."


def _summarize_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Summarize a journal entry; many banned documents become a count."""
    summary = {name: value for name, value in entry.items() if name != "fingerprint"}
    if "ban" in summary:
        summary["ban"] = {
            name: numbers
            if len(numbers) <= _MAX_LISTED
            else f"{len(numbers):,} documents from {numbers[0]} to {numbers[-1]}"
            for name, numbers in summary["ban"].items()
        }
    return summary


def _parse_weights(text: str) -> Any:
    if text == "size":
        return text
    if text.lstrip().startswith("{"):
        return parse_yaml(text.encode(), "--weights")
    return parse_weights(text, "--weights")


def _parse_bans(words: list[str]) -> dict[str, list[int]]:
    bans: dict[str, list[int]] = {}
    for word in words:
        name, colon, numbers = word.rpartition(":")
        try:
            bans.setdefault(name if colon else "data", []).extend(map(int, numbers.split(",")))
        except ValueError:
            raise SettingsError([f"--ban: {quote_value(word)} is no SOURCE:NUMBER,NUMBER,..."]) from None
    return bans
