"""Check the calls of models from the import of the module that defines them on."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from types import ModuleType

# transformers may be imported after the first batch. The second module defines the models that torch.compile returns.
_DEFINING_MODULES = ("transformers.modeling_utils", "torch._dynamo.eval_frame")


def check_later_model_calls() -> None:
    """Check all later calls of models of transformers, imported now or later."""
    if any(name in sys.modules for name in _DEFINING_MODULES):
        _check_model_calls()
    if not any(isinstance(finder, _DefiningModuleFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _DefiningModuleFinder())


class _DefiningModuleFinder(MetaPathFinder):
    """Finds the modules that define models, as the finder of files does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _DEFINING_MODULES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return spec
        return spec_from_file_location(fullname, loader=_DefiningModuleLoader(fullname, spec.loader.path))


class _DefiningModuleLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _check_model_calls()


def _check_model_calls() -> None:
    from batchloom.batches.model_calls import check_model_calls  # noqa: PLC0415 - torch is optional

    check_model_calls()
