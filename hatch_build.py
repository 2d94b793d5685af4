"""Build hook that compiles the native kernel; without a compiler the package is built without it."""

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = "src/batchloom/batches/assembly"


class KernelBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - the hook's signature
        folder = Path(self.root, _FOLDER)
        module = runpy.run_path(str(folder / "kernel_build.py"))
        try:
            library = module["compile_kernel"](folder)
        except OSError as error:
            self.app.display_warning(f"The native kernel is not built, and batches are made by numpy: {error}")
            return
        build_data["artifacts"].append(f"{_FOLDER}/{library.name}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
