"""Check the calls of models from the import of the module that defines them on."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_MODELS_MODULE = "transformers.modeling_utils"
# transformers may be imported after the first batch. The second module defines the models that torch.compile returns.
_DEFINING_MODULES = (_MODELS_MODULE, "torch._dynamo.eval_frame")


def check_later_model_calls() -> None:
    """Check all later calls of models of transformers, imported now or later."""
    if not any(isinstance(finder, _DefiningModuleFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _DefiningModuleFinder())
    if _MODELS_MODULE in sys.modules:
        # Another thread may be importing it: wait for its classes.
        importlib.import_module(_MODELS_MODULE)
        _check_model_calls()


class _DefiningModuleFinder(MetaPathFinder):
    """Finds the modules that define models, as the finder of files does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _DEFINING_MODULES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            _check_after_import(spec.loader)
        return spec


def _check_after_import(loader: Loader) -> None:
    """Let a loader of one module check calls of models once it has run the module."""
    execute = loader.exec_module

    def execute_and_check(module: ModuleType) -> None:
        execute(module)
        _check_model_calls()

    loader.exec_module = execute_and_check  # type: ignore[method-assign]


def _check_model_calls() -> None:
    if _MODELS_MODULE not in sys.modules:
        return
    from batchloom.batches.model_calls import check_model_calls

    check_model_calls()
