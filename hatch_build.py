"""Build hook that compiles the native libraries; without a compiler the package is built without them."""

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        native = runpy.run_path(str(Path(self.root, "src/batchloom/core/native.py")))
        try:
            libraries = [native["compile_library"](source, source.parent) for source in native["SOURCES"]]
        except OSError as error:
            self.app.display_warning(f"The native libraries are not built; numpy and Python do their work: {error}")
            return
        build_data["artifacts"] += [str(library.relative_to(self.root)) for library in libraries]
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
