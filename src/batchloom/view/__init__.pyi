from .server import (
    ViewSpec as ViewSpec,
    make_pages as make_pages,
    make_server as make_server,
    serve_view as serve_view,
)
from .target import PlanChoice as PlanChoice, ViewTarget as ViewTarget
