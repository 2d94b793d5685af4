from .server import ViewSpec as ViewSpec, make_server as make_server, serve_view as serve_view
from .target import ViewTarget as ViewTarget
