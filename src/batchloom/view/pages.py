"""Pages: each reads parameters, collects values and renders a template.

First those of prepared data, then pages in one file and displays in notebooks, and the page of raw inputs.
"""

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, final

import numpy as np
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from batchloom.analysis import list_packings, measure_packing
from batchloom.batches import IGNORE_INDEX, Batch
from batchloom.chat import TEMPLATE_NAMES
from batchloom.core.addresses import redact_url
from batchloom.core.errors import BatchloomError, InputError, StoreError, TokenizerError
from batchloom.core.medium import MEDIUM_KINDS
from batchloom.plan import Plan
from batchloom.store import Store, StoreMedia, decode_beginning, find_documents
from batchloom.store.format import CHECK_REMEDY, DocumentProvenance, mask_removed
from batchloom.store.read import find_provenance
from batchloom.view.documents.document_family import can_search_copies, find_copies, has_signatures, read_dropped_copies
from batchloom.view.documents.document_media import list_media, read_shown_medium
from batchloom.view.documents.document_search import (
    MAX_SEARCHED_TOKENS,
    DocumentFilter,
    Excerpt,
    SearchResult,
    find_by_hash,
    find_text,
    search_documents,
)
from batchloom.view.documents.document_tokens import WINDOW_TOKENS, read_window
from batchloom.view.overview import list_sides, make_overview
from batchloom.view.packed_rows import PACKING_ROWS, describe_step, find_runs
from batchloom.view.page_rendering import make_address, read_choice, read_number, render_file, respond
from batchloom.view.plan_pages import PlanPages
from batchloom.view.run_pages import RunPages
from batchloom.view.target import RELOAD_HEADERS, PlanChoice, ViewTarget, is_near, is_small

if TYPE_CHECKING:
    from batchloom.analysis.doctor import Diagnosis

_LISTED_DOCUMENTS = 50
_BEGINNING_TOKENS = 96
_BEGINNING_CHARACTERS = 240
# Sources whose paths are shortened; those beyond are shown whole.
_MOST_SHORTENED = 10_000
_SEARCH_MODES = ("text", "regex", "hash", "line")


@dataclass(frozen=True, slots=True)
class ListedDocument:
    """A row of the list of documents.

    Attributes:
        number: number of the document in its store.
        tokens: its length.
        beginning: its first words; its first ids if the store has no tokenizer.
        excerpt: text around the match of a search; None without one.
        provenance: its source record; None if the store does not record it.
        removed: whether it was removed from the store.
        source: end of the path of its source that no other source has.
    """

    number: int
    tokens: int
    beginning: str
    excerpt: Excerpt | None
    provenance: DocumentProvenance | None
    removed: bool
    source: str


@final
class Pages:
    """The pages of a target.

    Args:
        target: the data on the pages.

    Attributes:
        first_page: path of the page that is opened first.
    """

    def __init__(self, target: ViewTarget) -> None:
        self._target = target
        self.first_page = "/run" if target.kind == "run" else "/"

    def list_routes(self) -> list[Route]:
        """Return the addresses of the pages."""
        return [
            Route("/", self.show_overview),
            Route("/documents", self.show_documents),
            Route("/documents/more", self.show_more_documents),
            Route("/document/{number:number}", self.show_document),
            Route("/document/{number:number}/json", self.copy_document),
            Route("/document/{number:number}/copies", self.show_copies),
            Route("/document/{number:number}/copies/dropped", self.show_dropped_copies),
            Route("/document/{number:number}/media/{index:number}", self.show_medium),
            Route("/packing", self.show_packing),
            Route("/packing/strategies", self.show_strategies),
            *PlanPages(self._target).list_routes(),
            *(RunPages(self._target).list_routes() if self._target.kind == "run" else ()),
        ]

    def _open(self, request: Request) -> tuple[Store, dict[str, Any]]:
        """Open the store that a request names; return the values of the frame of its page."""
        self._target.require_data()
        source = request.query_params.get("source") or self._target.source_names[0]
        store = self._target.open_store(source, request.query_params.get("split", ""))
        selection = {"source": source if len(self._target.source_names) > 1 else "", "split": store.split}
        return store, {
            "target": self._target,
            "heading": self._target.path,
            "store": store,
            "selection": selection,
            "source": source,
            "page": request.url.path.strip("/").partition("/")[0] or "overview",
        }

    def show_overview(self, request: Request) -> Response:
        """Show what a store is, its sources and lengths, and what preparation removed."""
        if self._target.kind == "run" and self._target.read_run().fault:
            return RedirectResponse("/run", 303)
        store, frame = self._open(request)
        values = {**frame, "overview": make_overview(store), "stores": self._list_stores()}
        response = respond("overview.html.j2", values)
        # Most readers open a document next, and a large vocabulary takes a second to load.
        response.background = BackgroundTask(_load_tokenizer, store)
        return response

    def _list_stores(self) -> list[tuple[str, int, int]]:
        """Return name, documents and tokens of all sources; empty for a single store."""
        if len(self._target.source_names) < 2:
            return []
        stores = [(name, self._target.open_store(name)) for name in self._target.source_names]
        return [(name, len(store), store.tokens) for name, store in stores]

    def show_documents(self, request: Request) -> Response:
        """Show the list of documents, filtered and searched."""
        store, frame = self._open(request)
        fault = ""
        try:
            results = _search(store, request)
        except InputError as error:
            # The reader corrects the form on the same page.
            fault = str(error)
            results = {"documents": [], "next_document": None, "parameters": _read_parameters(request), "start": ""}
        values = {
            **frame,
            **results,
            "fault": fault,
            "files": [source.name for source in store.manifest.sources[:1000]] if store.manifest else [],
            "sides": list_sides(store),
            "media": _list_media(store),
            "modes": _SEARCH_MODES,
            "searched_tokens": MAX_SEARCHED_TOKENS,
        }
        return respond("documents.html.j2", values, status=400 if fault else 200)

    def show_more_documents(self, request: Request) -> Response:
        """Show further rows of the list, which the page appends."""
        store, frame = self._open(request)
        values = {**frame, **_search(store, request)}
        here = make_address("/documents", values["selection"], values["parameters"], {"start": values["start"]})
        # Back from a document leads to the part of a long search that has the first matches.
        is_first = values["documents"] and "listed" not in request.query_params
        return respond("document_rows.html.j2", values, {"HX-Replace-Url": here} if is_first else None)

    def show_document(self, request: Request) -> Response:
        """Show a part of a document as text or tokens, with its loss and its origin."""
        store, frame = self._open(request)
        number = check_number(store, request.path_params["number"])
        at = read_number(request, "at", 0)
        text = request.query_params.get("find", "")
        if text and "at" not in request.query_params:
            conditions = DocumentFilter(text=text, regex=request.query_params.get("mode") == "regex")
            at = find_text(store, number, conditions)
        values = {
            **frame,
            **describe_document(store, number, at),
            "row_start": read_number(request, "from", 0),
            "row_stop": read_number(request, "to", 0),
            "as_tokens": request.query_params.get("as") == "tokens",
            "step": WINDOW_TOKENS,
        }
        return respond("document.html.j2", values)

    def copy_document(self, request: Request) -> Response:
        """Return a part of a document as JSON."""
        store, _ = self._open(request)
        number = check_number(store, request.path_params["number"])
        window = read_window(store, number, read_number(request, "at", 0))
        provenance = find_provenance(store, [number])[0]
        groups = window.groups
        return JSONResponse(
            {
                "document": number,
                "tokens": window.tokens,
                "start": window.start,
                "stop": window.stop,
                "source": provenance.source if provenance else None,
                "position": provenance.position if provenance else None,
                "columns": provenance.columns if provenance else {},
                "text": window.text,
                "ids": [token for group in groups for token in group.ids],
                "loss_weights": window.loss_weights,
            }
        )

    def show_copies(self, request: Request) -> Response:
        """Show equal and similar documents, which the page of a document appends."""
        store, frame = self._open(request)
        number = check_number(store, request.path_params["number"])
        start = read_number(request, "start", 0)
        search = find_copies(store, number, start)
        dropped = None
        dropped_fault = ""
        if not start:
            try:
                dropped = read_dropped_copies(store, number)
            except StoreError as error:
                dropped_fault = str(error)
        values = {
            **frame,
            "number": number,
            "search": search,
            "first": not start,
            "has_signatures": has_signatures(store),
            "documents": _list_documents(store, [copy.number for copy in search.copies], {}),
            "dropped": dropped,
            "dropped_fault": dropped_fault,
        }
        return respond("copies.html.j2", values)

    def show_dropped_copies(self, request: Request) -> Response:
        """Show further rows of dropped duplicates, which the page of a document appends."""
        store, frame = self._open(request)
        number = check_number(store, request.path_params["number"])
        start = read_number(request, "start", 0)
        dropped = read_dropped_copies(store, number, start)
        return respond("dropped_copies.html.j2", {**frame, "number": number, "dropped": dropped})

    def show_medium(self, request: Request) -> Response:
        """Return an image, a sound or a video frame of a document."""
        store, _ = self._open(request)
        number = check_number(store, request.path_params["number"])
        data, kind = read_shown_medium(store, number, request.path_params["index"])
        return Response(data, media_type=kind)

    def show_packing(self, request: Request) -> Response:
        """Show the rows of a step to scale."""
        store, frame = self._open(request)
        choice = read_choice(request, self._target.choice)
        plan = self._target.make_plan(choice)
        step = read_number(request, "step", 0)
        first = read_number(request, "row", 0)
        is_counted = self._target.has_counts(plan)
        if not is_counted and not is_near(plan, step):
            values = {**frame, "step": step, "choice": choice.parameters}
            return respond("counting.html.j2", values, headers=RELOAD_HEADERS)
        values = {
            **frame,
            **describe_step(plan, step, first, PACKING_ROWS),
            "choice": choice.parameters,
            # A mixture and a run name a subset for each source.
            "plan_split": store.split if self._target.kind == "store" else "",
            "assumed": self._target.assumes_steps(plan, choice),
            "packings": list_packings(store),
            "is_counted": is_counted,
        }
        return respond("packing.html.j2", values)

    def show_strategies(self, request: Request) -> Response:
        """Compare packing strategies and sequence lengths on the same documents."""
        store, frame = self._open(request)
        choice = read_choice(request, self._target.choice)
        lengths = (max(choice.seq_len // 2, 2), choice.seq_len, choice.seq_len * 2)
        pairs = [
            *((packing, choice.seq_len) for packing in list_packings(store)),
            *((choice.packing, length) for length in lengths if length != choice.seq_len),
        ]
        table = [
            (seq_len, measure_packing(store, packing=packing, seq_len=seq_len, most_pools=1))
            for packing, seq_len in pairs
        ]
        return respond("strategies.html.j2", {**frame, "table": table, "choice": choice})


def _load_tokenizer(store: Store) -> None:
    # The pages that need the tokenizer show the error.
    with contextlib.suppress(BatchloomError):
        _ = store.manifest and store.tokenizer


def _read_parameters(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.query_params.items() if value and name not in ("source", "split")}


def _search(store: Store, request: Request) -> dict[str, Any]:
    """Run the search of a request; return its rows and how to continue it."""
    start = read_number(request, "start", 0)
    text = request.query_params.get("text", "")
    mode = request.query_params.get("mode", "text")
    if text and mode == "hash":
        result = find_by_hash(store, text.strip(), start)
    elif text and mode == "line":
        result = SearchResult(_find_line(store, text)[:_LISTED_DOCUMENTS], None)
    else:
        conditions = DocumentFilter(
            file=request.query_params.get("file", ""),
            least=read_number(request, "least", 0),
            most=read_number(request, "most", 0) if request.query_params.get("most") else None,
            side=request.query_params.get("side", ""),
            media=request.query_params.get("media", ""),
            text=text,
            regex=mode == "regex",
        )
        result = search_documents(store, conditions, start, most=_LISTED_DOCUMENTS)
    return {
        "documents": _list_documents(store, result.documents, result.excerpts),
        "next_document": result.next_document,
        "parameters": _read_parameters(request),
        "start": start,
        "is_text_search": bool(text) and mode in ("text", "regex"),
    }


def _find_line(store: Store, text: str) -> list[int]:
    """Return the documents of ``FILE:LINE``, counted from 1."""
    file, _, line = text.strip().rpartition(":")
    if not file or not line.isdecimal() or int(line) < 1:
        raise InputError(f"{text!r} is not FILE:LINE, such as data.jsonl:17.")
    sources = store.manifest.sources if store.manifest else ()
    # A reader may paste a whole path.
    names = {source.name for source in sources if f"/{file}".endswith(f"/{source.name}")}
    return find_documents(store, max(names, key=len, default=file), int(line) - 1)


def _list_documents(store: Store, numbers: Sequence[int], excerpts: Mapping[int, Excerpt]) -> list[ListedDocument]:
    documents = np.array(numbers, np.int64)
    tokens = store.lengths.take(documents)
    views = store.read(documents, np.zeros(len(documents), np.int64), np.minimum(tokens, _BEGINNING_TOKENS))
    removed = mask_removed(store.contents.removed, documents)
    sources = store.manifest.sources if store.manifest else ()
    short_names = shorten_paths(tuple(source.name for source in sources[:_MOST_SHORTENED]))
    return [
        ListedDocument(
            number,
            length,
            _decode(store, view),
            excerpts.get(number),
            provenance,
            is_removed,
            short_names.get(provenance.source, provenance.source) if provenance else "",
        )
        for number, length, view, provenance, is_removed in zip(
            numbers, tokens.tolist(), views, find_provenance(store, numbers), removed.tolist(), strict=True
        )
    ]


@functools.lru_cache(maxsize=8)
def shorten_paths(paths: tuple[str, ...]) -> dict[str, str]:
    """Return the end of each path that no other path has, in whole components."""
    short: dict[str, str] = {}
    pending = dict.fromkeys(paths)
    depth = 1
    while pending:
        ends = {path: "/".join(path.split("/")[-depth:]) for path in pending}
        counts = Counter(ends.values())
        short |= {path: end for path, end in ends.items() if counts[end] == 1 or end == path}
        pending = dict.fromkeys(path for path in pending if path not in short)
        depth += 1
    return short


def _decode(store: Store, ids: Any) -> str:
    if store.manifest is None:
        return " ".join(map(str, ids[:16].tolist()))
    tokenizer = store.tokenizer
    try:
        text = decode_beginning(tokenizer, ids, _BEGINNING_TOKENS)
    except TokenizerError:
        # The ids of one document are damaged; the other documents can be shown.
        return f"(damaged: {CHECK_REMEDY})"
    return " ".join(text.split())[:_BEGINNING_CHARACTERS]


def describe_document(
    store: Store, number: int, at: int, most: int = WINDOW_TOKENS, *, embed: bool = False
) -> dict[str, Any]:
    """Return the values of the template of a document, from token ``at`` on.

    With ``embed`` they hold the bytes of its media, for a page in one file.
    """
    removed = bool(mask_removed(store.contents.removed, np.array([number]))[0])
    media, more_media = ([], 0) if removed else list_media(store, number, embed=embed)
    return {
        "number": number,
        "window": read_window(store, number, at, most),
        # Tokens of the row from which the reader comes.
        "row_start": 0,
        "row_stop": 0,
        "marked": store.masked or store.reader.weighted,
        "provenance": find_provenance(store, [number])[0],
        "removed": removed,
        "media": media,
        "more_media": more_media,
        "has_copies": can_search_copies(store),
    }


def check_number(store: Store, number: int) -> int:
    """Return the number of a document, if there is one."""
    if number >= len(store):
        raise InputError(f"There is no document {number:,}: there are {len(store):,}, numbered from 0.")
    return number


def _list_media(store: Store) -> list[str]:
    return list(MEDIUM_KINDS) if StoreMedia(store).any else []


_FILE_TOKENS = 1 << 16
_FILE_ROWS = 64
_NOTEBOOK_ROWS = 8


def make_page_file(
    target: ViewTarget, choice: PlanChoice, *, step: int | None = None, document: int | None = None
) -> tuple[str, str]:
    """Return what a page of a target shows, and its HTML, which needs no other file.

    Args:
        target: the data of the page; of several stores the first is shown.
        choice: settings of the plan of a step.
        step: show the rows of this step.
        document: show this document. Without it and ``step``, show the overview.

    Raises:
        InputError, PlanError: there is no such document or step.
        StoreError: a file of the store is damaged.
    """
    if step is not None:
        plan = target.make_plan(choice)
        html = _render_step(plan, step, _FILE_ROWS, assumed=target.assumes_steps(plan, choice))
        return f"step {step:,} of {redact_url(target.path)}", html
    store = target.open_store(target.source_names[0])
    name = redact_url(target.path) if target.kind == "store" else store.location.name
    if document is None:
        return f"the overview of {name}", _render_overview(store)
    details = describe_document(store, check_number(store, document), 0, _FILE_TOKENS, embed=True)
    values = {"store": store, "selection": {}, "as_tokens": False, "data_name": _name_data(store)}
    return f"document {document:,} of {name}", render_file("document.html.j2", {**values, **details})


def make_notebook_html(value: object) -> str | None:
    """Return the notebook display of a store, plan or batch; None for others."""
    if isinstance(value, Store):
        page = _render_overview(value)
    elif isinstance(value, Plan):
        page = _render_step(value, 0, _NOTEBOOK_ROWS)
    elif isinstance(value, Batch):
        page = _render_batch(value)
    else:
        return None
    # A frame keeps the styles of the page away from those of the notebook, and sandboxes the data.
    return f'<iframe sandbox srcdoc="{escape(page)}" width="100%" height="420" frameborder="0"></iframe>'


def _name_data(store: Store) -> str:
    """Return the name of a store and its subset, without the folder that it is in."""
    name = store.location.name.rstrip("/").rpartition("/")[2]
    return f"{name}, subset {store.split}" if store.split else name


def _render_overview(store: Store) -> str:
    values: dict[str, Any] = {
        "heading": _name_data(store),
        "data_name": "",
        "target": None,
        "source": "",
        "selection": {},
        "store": store,
    }
    return render_file("overview.html.j2", {**values, "overview": make_overview(store), "stores": []})


def _render_step(plan: Plan, step: int, most: int, *, assumed: bool = False) -> str:
    values = {"selection": {}, "plan_split": "", "choice": {}, "is_counted": is_small(plan), "assumed": assumed}
    stores = [store for store in plan.stores.values() if isinstance(store, Store)]
    # The legend of a step names the sources of a mixture.
    values["data_name"] = _name_data(stores[0]) if len(plan.stores) == len(stores) == 1 else ""
    return render_file("packing.html.j2", {**values, **describe_step(plan, step, 0, most)})


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A row of a batch: offset and length of its spans, and its trained token ranges."""

    seq_len: int
    spans: list[tuple[int, int]]
    trained: list[tuple[int, int]]

    @property
    def filled(self) -> int:
        """Number of tokens that are not padding."""
        return sum(length for _, length in self.spans)


def _render_batch(batch: Batch) -> str:
    arrays = [
        (name, ", ".join(map(str, value.shape)), str(value.dtype).removeprefix("torch."))
        for name, value in batch.items()
        if hasattr(value, "shape")
    ]
    rows = _list_batch_rows(batch)
    values: dict[str, Any] = {
        "data_name": "",
        "batch": batch,
        "arrays": arrays,
        "rows": rows[:_NOTEBOOK_ROWS],
        "all_rows": len(rows),
    }
    return render_file("batch.html.j2", values)


def _list_batch_rows(batch: Batch) -> list[BatchRow]:
    """Return the rows of a batch; none if it is varlen or was rebuilt."""
    layout = batch.layout
    labels = batch.get("labels")
    if layout is None or layout.sliced or labels is None or labels.ndim != 2:
        return []
    trained = np.asarray(labels.cpu() if hasattr(labels, "cpu") else labels) != IGNORE_INDEX
    spans = list(zip(layout.offsets.tolist(), layout.lengths.tolist(), strict=True))
    bounds = layout.pointers.tolist()
    return [
        BatchRow(len(flags), spans[bounds[row] : bounds[row + 1]], find_runs(flags))
        for row, flags in enumerate(trained)
    ]


_PREVIEWED_DOCUMENTS = 10
_SETTINGS = ("tokenizer", "template", "train_on", "map")


@final
class RawInputPages:
    """The page of raw inputs.

    Args:
        inputs: inputs as ``batchloom prepare`` takes them.

    Attributes:
        first_page: path of the page.
    """

    first_page = "/"

    def __init__(self, inputs: Sequence[str]) -> None:
        self._inputs = tuple(inputs)
        # A large sample takes seconds and all cores, so that requests wait for each other.
        self._lock = threading.Lock()

    def list_routes(self) -> list[Route]:
        """Return the address of the page."""
        return [Route("/", self.show_inputs)]

    def show_inputs(self, request: Request) -> Response:
        """Show schema, mapping, first documents and faults with the settings of the form."""
        settings = {name: request.query_params.get(name, "").strip() for name in _SETTINGS}
        values: dict[str, Any] = {
            "inputs": [redact_url(argument) for argument in self._inputs],
            "settings": settings,
            "templates": TEMPLATE_NAMES,
            "diagnosis": None,
            "message": "",
        }
        try:
            values["diagnosis"] = self._diagnose(settings)
        except BatchloomError as error:
            # The settings are in the form, where the reader corrects them.
            values["message"] = str(error)
        return respond("raw_inputs.html.j2", values)

    def _diagnose(self, settings: dict[str, str]) -> "Diagnosis":
        from batchloom.analysis.doctor import doctor
        from batchloom.preparation import DocumentOptions

        options = DocumentOptions(
            tokenizer=settings["tokenizer"] or None,
            template=settings["template"] or None,
            train_on=settings["train_on"] or None,
            mapping=settings["map"] or None,
        )
        with self._lock:
            return doctor(list(self._inputs), preview=_PREVIEWED_DOCUMENTS, **options)
