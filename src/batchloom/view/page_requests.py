"""Parameters of requests, and their responses."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from batchloom.core.errors import InputError
from batchloom.view.page_templates import render
from batchloom.view.target import PlanChoice

_MOST, _MOST_DIGITS = 1 << 40, 13


def respond(template: str, values: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """Return the response with a rendered template."""
    return HTMLResponse(render(template, values), headers={"Cache-Control": "no-store", **(headers or {})})


def read_number(request: Request, name: str, default: int, least: int = 0) -> int:
    """Return a whole number of a request; InputError names one that is none."""
    text = request.query_params.get(name, "").replace(",", "").strip()
    if not text:
        return default
    if not text.isdecimal() or len(text) > _MOST_DIGITS or not least <= int(text) <= _MOST:
        raise InputError(f"{name}: {text[:40]!r} is not a whole number from {least:,} to {_MOST:,}")
    return int(text)


def read_choice(request: Request) -> PlanChoice:
    """Return the settings of the plan that a request chooses."""
    default = PlanChoice()
    return PlanChoice(
        seq_len=read_number(request, "seq_len", default.seq_len, 1),
        global_batch_size=read_number(request, "batch", default.global_batch_size, 1),
        packing=request.query_params.get("packing") or default.packing,
        seed=read_number(request, "seed", default.seed),
        steps=read_number(request, "steps", 0) or None,
        split=request.query_params.get("split", ""),
    )


def describe_choice(choice: PlanChoice) -> dict[str, Any]:
    """Return the parameters of a choice, as they stand in addresses."""
    return {
        "seq_len": choice.seq_len,
        "batch": choice.global_batch_size,
        "packing": choice.packing,
        "seed": choice.seed,
        "steps": choice.steps,
        "split": choice.split,
    }
