"""Page of raw inputs: the findings of ``doctor``, with a form for its settings."""

import threading
from collections.abc import Sequence
from typing import Any, final

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from batchloom.analysis.doctor import Diagnosis, doctor
from batchloom.chat import TEMPLATE_NAMES, parse_mapping
from batchloom.core.addresses import redact_url
from batchloom.core.errors import BatchloomError
from batchloom.preparation.settings import DocumentOptions
from batchloom.view.page_templates import render

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
        return HTMLResponse(render("raw_inputs.html.j2", values), headers={"Cache-Control": "no-store"})

    def _diagnose(self, settings: dict[str, str]) -> Diagnosis:
        options = DocumentOptions()
        if settings["tokenizer"]:
            options["tokenizer"] = settings["tokenizer"]
        if settings["template"]:
            options["template"] = settings["template"]
        if settings["train_on"]:
            options["train_on"] = settings["train_on"]
        if settings["map"]:
            options["mapping"] = parse_mapping(settings["map"])
        with self._lock:
            return doctor(list(self._inputs), preview=_PREVIEWED_DOCUMENTS, **options)
