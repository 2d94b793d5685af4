from .pages import make_notebook_html as make_notebook_html
from .server import (
    ViewSpec as ViewSpec,
    make_pages as make_pages,
    make_server as make_server,
    serve_view as serve_view,
    write_view as write_view,
)
from .target import PlanChoice as PlanChoice, ValueCache as ValueCache, ViewTarget as ViewTarget
