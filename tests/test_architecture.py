"""Rules of the source tree: imports, start-up cost, public names."""

import ast
import functools
import graphlib
import importlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import batchloom
from batchloom.plan import parse_assumed_stores

SOURCE = Path(batchloom.__file__).parent

# Packages of batchloom that each package may import, besides itself (DESIGN: data and imports flow one way).
ALLOWED_IMPORTS = {
    "core": set(),
    "remote": {"core"},
    # HTML in web archives becomes text as by the cleaning step.
    "sources": {"core", "remote", "text"},
    "text": {"core"},
    "chat": {"core"},
    "media": {"core", "remote"},
    "tokens": {"core", "remote"},
    "store": {"core", "remote", "tokens"},
    "plan": {"core"},
    "preparation": {
        *("core", "remote", "sources", "text", "chat", "media", "tokens", "store", "plan"),
    },
    "batches": {"core", "store", "plan", "media"},
    "streaming": {
        *("core", "sources", "chat", "media", "tokens", "text", "store", "plan", "preparation"),
    },
    "analysis": {
        *("core", "remote", "sources", "chat", "tokens", "store", "plan", "preparation"),
        *("batches", "batchloom", "adapters", "examples", "streaming"),
    },
    "adapters": {"core", "batches", "plan", "store"},
    # compat imports train for scripts that request a worker.
    "compat": {"core", "sources", "chat", "tokens", "store", "plan", "preparation", "batches"} | {"train"},
    # The trainer uses the metrics of a run and the isolation of packed documents from their public modules, and the
    # type that batchloom.stream returns.
    "train": {"core", "batchloom", "batches", "adapters", "streaming", "plan", "store"},
    "testing": {"core", "tokens", "store", "plan", "batches"},
    "examples": {"batchloom", "adapters", "batches", "store"},
    "view": {
        *("core", "chat", "tokens", "store", "plan", "preparation", "batches", "analysis", "adapters"),
    },
    "cli": {
        *("core", "chat", "store", "preparation", "batches", "batchloom", "analysis", "train", "view"),
    },
}
# Packages whose modules are their interface: small libraries, and one module per framework or example.
OPEN_PACKAGES = {"core", "adapters", "examples"}
# A mask of flex_attention is a torch type, so batches/masks.py imports torch inside its functions.
# batches/isolation.py, batches/probe_documents.py and testing/equivalence.py compare losses of a torch model, for
# trainers and for users' tests; batches/model_calls.py is loaded with transformers.
TORCH_FREE_EXCEPT = (
    *("train/", "adapters/", "examples/", "analysis/compare/"),
    *("batches/assembly/device.py", "batches/masks.py"),
    *("batches/isolation.py", "batches/model_calls.py", "batches/probe_documents.py", "testing/equivalence.py"),
    # Its class is a torch IterableDataset, and the module is loaded on first use.
    "compat/multimodal_stream.py",
)
ALLOWED_IN_PLAN = {"numpy", "batchloom", "lazy_loader"} | (
    set(sys.stdlib_module_names) - {"os", "pathlib", "time", "random", "io", "socket", "subprocess", "datetime"}
)


@functools.cache
def parse_nodes(path: Path) -> list[ast.AST]:
    """Return every node of a file."""
    return list(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def _forget_nodes():
    """Forget these two million objects: every garbage collection of later tests would traverse them."""
    yield
    parse_nodes.cache_clear()


def list_imports(path: Path) -> list[tuple[int, str]]:
    """Return (line, module) of all imports, including late and type-checking ones."""
    modules = []
    for node in parse_nodes(path):
        if isinstance(node, ast.Import):
            modules += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            if module == "batchloom":
                modules += [(node.lineno, f"batchloom.{alias.name}") for alias in node.names]
            else:
                modules.append((node.lineno, module))
    return modules


def get_package(module: str) -> str:
    """Return the top-level package of a module; ``batchloom`` for the public API."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (SOURCE / parts[1]).is_dir() else "batchloom"


MODULES = sorted(SOURCE.rglob("*.py"))


def find_forbidden_imports(path: Path) -> list[str]:
    relative = path.relative_to(SOURCE)
    own = relative.parts[0]
    if own in ("__init__.py", "__main__.py"):
        return []
    wrong = []
    for line, module in list_imports(path):
        if module.split(".")[0] != "batchloom":
            continue
        target = get_package(module)
        if target != own and target not in ALLOWED_IMPORTS[own]:
            wrong.append(f"{relative}:{line}: {own} imports {target} ({module})")
    return wrong


def test_every_package_has_import_rules():
    assert {p.name for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__"} == set(ALLOWED_IMPORTS)


def test_imports_flow_one_way():
    assert [line for path in MODULES for line in find_forbidden_imports(path)] == []


def get_package_path(path: Path) -> str:
    """Return the dotted name of a file's folder: ``batchloom.store.read``."""
    return ".".join(path.parent.relative_to(SOURCE.parent).parts)


PACKAGES = {get_package_path(path) for path in SOURCE.rglob("__init__.py")}


def find_bypassing_imports(path: Path) -> list[str]:
    """Return imports from other top-level packages that bypass their interface.

    Inside a top-level package, modules import each other directly: a reader sees where a name is defined.
    """
    own = path.relative_to(SOURCE).parts[0]
    wrong = []
    for line, module in list_imports(path):
        parts = module.split(".")
        if parts[0] != "batchloom" or len(parts) == 2 or module in PACKAGES:
            continue
        if parts[1] != own and parts[1] not in OPEN_PACKAGES:
            wrong.append(f"{path.relative_to(SOURCE)}:{line}: {module}")
    return wrong


def test_packages_import_each_other_through_interfaces():
    inner = [path for path in MODULES if path.parent != SOURCE]
    assert [line for path in inner for line in find_bypassing_imports(path)] == []


def map_exports_to_modules() -> dict[tuple[str, str], str]:
    """Return the module of each name that a package exports."""
    return {
        (get_package_path(stub), alias.name): f"{get_package_path(stub)}.{node.module}"
        for stub in SOURCE.rglob("__init__.pyi")
        for node in parse_nodes(stub)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def get_unit(module: str) -> str:
    """Return the sub-package of a module, or the module if it is next to sub-packages."""
    package = module.rpartition(".")[0]
    inner = any(name.startswith(f"{package}.") for name in PACKAGES)
    return module if inner else package


def build_import_graph() -> dict[str, set[str]]:
    """Return imports between units, including late and type-checking ones."""
    exported, graph = map_exports_to_modules(), dict[str, set[str]]()
    for path in MODULES:
        if path.name == "__init__.py":
            continue
        own = get_unit(f"{get_package_path(path)}.{path.stem}")
        for node in parse_nodes(path):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            for alias in node.names:
                module = exported.get((node.module, alias.name), node.module)
                if module.startswith("batchloom.") and module not in PACKAGES:
                    graph.setdefault(own, set()).add(get_unit(module))
    return {own: {unit for unit in units if unit != own} for own, units in graph.items()}


def test_sub_packages_import_each_other_one_way():
    order = graphlib.TopologicalSorter(build_import_graph())
    order.prepare()  # raises CycleError with the packages of a cycle


def list_module_imports(path: Path) -> set[str]:
    """Return the batchloom modules that a file imports outside of functions.

    Type-checking imports are included.
    """
    inner = {
        id(node)
        for function in parse_nodes(path)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    exported = map_exports_to_modules()
    return {
        exported.get((node.module, alias.name), node.module)
        for node in parse_nodes(path)
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in inner
        for alias in node.names
    }


@pytest.mark.parametrize("package", ["plan", "store"])
def test_modules_of_a_package_import_each_other_one_way(package):
    """Check type-checking imports too: a class that makes another is in its module."""
    paths = [path for path in (SOURCE / package).rglob("*.py") if path.name != "__init__.py"]
    assert len(paths) > 10
    order = graphlib.TopologicalSorter(
        {f"{get_package_path(path)}.{path.stem}": list_module_imports(path) for path in paths}
    )
    order.prepare()  # raises CycleError with the modules of a cycle


def test_plan_has_few_public_names():
    """Limit the members of ``Plan``."""
    plan = batchloom.Plan(
        parse_assumed_stores("9M tokens, 1K documents")["data"],
        batchloom.PlanSpec(seq_len=4, global_batch_size=1),
    )
    public = sorted(name for name in dir(plan) if not name.startswith("_"))
    assert len(public) <= 26, public


def test_a_store_has_few_public_names(tmp_path):
    from batchloom.testing import write_store

    write_store(tmp_path / "s", [[1, 2, 3]])
    names = [name for name in dir(batchloom.open_store(tmp_path / "s")) if name[0] != "_"]
    assert len(names) <= 20, names


def test_folders_stay_small():
    """Allow at most 20 files per folder."""
    sizes = {package: len(list(folder.glob("*.py"))) for package, folder in list_package_folders()}
    assert {package: size for package, size in sizes.items() if size > 20} == {}


def list_package_folders() -> list[tuple[str, Path]]:
    return [(get_package_path(path), path.parent) for path in SOURCE.rglob("__init__.py")]


def test_class_names_are_unique():
    """Compare private names without their underscore: a name has one meaning."""
    names = Counter(
        node.name.strip("_") for path in MODULES for node in parse_nodes(path) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_module_names_are_unique():
    """Allow equal names only for files of a command or example."""
    names = Counter(
        path.stem
        for path in MODULES
        if path.name != "__init__.py" and path.relative_to(SOURCE).parts[0] not in ("cli", "examples")
    )
    assert [name for name, count in names.items() if count > 1] == []


MOST_IMPORTED_NAMES = 40
# Modules that are not divided yet.
UNDIVIDED = {
    "preparation/documents/encode_chat.py",
    "preparation/documents/record_parsers.py",
    "preparation/request/inputs.py",
    "preparation/request/recipe_file.py",
    "preparation/settings/recipe.py",
}


def count_imported_names(path: Path) -> int:
    return len(
        {
            alias.asname or alias.name
            for node in parse_nodes(path)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
    )


def test_modules_of_preparation_import_few_names():
    """Allow 40 names: a module that needs more does several things."""
    counts = {path.relative_to(SOURCE): count_imported_names(path) for path in (SOURCE / "preparation").rglob("*.py")}
    assert {str(name) for name, count in counts.items() if count > MOST_IMPORTED_NAMES} == UNDIVIDED


# Modules that import ours late: their own start is quick, and what they import then is slow.
LATE_IMPORTERS = {
    "analysis/compare/frameworks.py",
    "analysis/doctor/path_check.py",
    "batches/loading/loader.py",
    "batches/model_import.py",
    "cli/compare.py",
    "cli/edit.py",
    "cli/main.py",
    "cli/train.py",
    "compat/worker_client.py",
    "preparation/request_run.py",
    "preparation/workers/executor_choice.py",
    "sources/formats/table_probe.py",
    "sources/part_reader.py",
    "view/pages.py",
}


def test_few_modules_import_ours_late():
    """The interfaces of packages are lazy, so that an import at the top costs little."""
    late = {
        str(path.relative_to(SOURCE))
        for path in MODULES
        for function in parse_nodes(path)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "batchloom"
    }
    assert late == LATE_IMPORTERS


def test_the_import_rule_detects_late_imports(tmp_path):
    offender = SOURCE / "plan" / "packing" / "pools.py"
    text = offender.read_text() + "\ndef late():\n    from batchloom.store import reader\n"
    copy = tmp_path / "pools.py"
    copy.write_text(text)
    assert (len(text.splitlines()), "batchloom.store") in list_imports(copy)


def test_few_modules_import_torch():
    wrong = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in MODULES
        for line, module in list_imports(path)
        if module.split(".")[0] == "torch" and not str(path.relative_to(SOURCE)).startswith(TORCH_FREE_EXCEPT)
    ]
    assert wrong == []


def test_plan_is_arithmetic():
    wrong = [
        f"{path.name}:{line} {module}"
        for path in (SOURCE / "plan").rglob("*.py")
        for line, module in list_imports(path)
        if module.split(".")[0] not in ALLOWED_IN_PLAN
    ]
    assert wrong == []


def test_names_and_signatures():
    problems = []
    for path in MODULES:
        name = path.relative_to(SOURCE)
        if path.stem in ("utils", "helpers", "common", "manager"):
            problems.append(f"{name}: a name that says nothing")
        for node in parse_nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                # Frameworks pass more keywords every year; a name of "_" marks keywords that are ignored.
                # A template passes arbitrary keywords to the functions it calls, click the options of a command, and
                # a training loop the inputs of a model.
                templates = ("chat/templates/sandbox.py", "chat/templates/operation_costs.py")
                if str(name) in (*templates, "cli/options.py", "batches/model_calls.py"):
                    continue
                # Options that a TypedDict declares are as visible to editors and type checkers as parameters.
                typed = node.args.kwarg and "Unpack[" in ast.unparse(node.args.kwarg.annotation or ast.Constant(0))
                if node.args.kwarg and node.args.kwarg.arg.strip("_") and not typed:
                    problems.append(f"{name}:{node.lineno}: {node.name} takes **kwargs")
    assert problems == []


# Public entry points, which list the fields of their specs as options of their own.
ENTRY_POINTS = {
    "compat/hub.py": {"create_huggingface_dataset"},
    "compat/multimodal_stream.py": {"__init__"},
    "analysis/doctor/diagnosis.py": {"doctor"},
    "preparation/conversion/row_conversion.py": {"convert"},
    "preparation/prepare_job.py": {"prepare"},
    "preparation/separate_stores.py": {"prepare_mixture"},
    "store/read/store_opening.py": {"open_store"},
    "streaming/raw_stream.py": {"stream"},
}


# A recipe or a spec is a value with all settings of a job, and a manifest is one flat block of settings.
MOST_FIELDS = {
    "Recipe": 14,
    "ReadRecipe": 16,
    "SourceRecipe": 16,
    "DatasetConfig": 13,
    "DatasetEntry": 15,
    "PlanSpec": 14,
    "BatchSpec": 13,
}


def find_oversized_definitions(path: Path) -> list[str]:
    """Return functions with over 7 parameters and settings with over 12 fields."""
    name, problems = str(path.relative_to(SOURCE)), []
    for node in parse_nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            positional = [a for a in node.args.posonlyargs + node.args.args if a.arg != "self"]
            is_entry_point = name.startswith("cli/") or node.name in ENTRY_POINTS.get(name, ())
            options = [] if is_entry_point else node.args.kwonlyargs
            if len(positional) + len(options) > 7:
                problems.append(f"{name}:{node.lineno}: {node.name} has more than 7 parameters")
        if isinstance(node, ast.ClassDef):
            methods = {statement.name for statement in node.body if isinstance(statement, ast.FunctionDef)}
            fields = [
                statement
                for statement in node.body
                if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation)
            ]
            validators = methods & {"__post_init__", "problems", "_contradictions"}
            if validators and len(fields) > MOST_FIELDS.get(node.name, 12):
                problems.append(f"{name}:{node.lineno}: {node.name} has {len(fields)} fields")
    return problems


def test_parameters_and_fields_are_few():
    assert [line for path in MODULES for line in find_oversized_definitions(path)] == []


def test_no_function_has_over_16_parameters():
    wrong = []
    for path in MODULES:
        for node in parse_nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and path.relative_to(SOURCE).parts[0] != "cli":
                parameters = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                if len(parameters) > 16:
                    wrong.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {node.name}")
    assert wrong == []


def test_a_loader_has_few_public_names():
    """Count methods and properties; what only adapters need is a separate function."""
    from batchloom.batches import Loader

    assert len([name for name in vars(Loader) if not name.startswith("_")]) <= 20


# Modules that hash keys to draw data orders and synthetic data. DRAWING_MODULES lists those that draw with torch:
# initial weights, dropout and the text a trained model generates.
SYNTHESIZING_MODULES = {
    "core/synthetic_data.py",
    *(f"plan/packing/{name}.py" for name in ("pools", "rows")),
    *(f"plan/order/{name}.py" for name in ("assumed_lengths", "run_positions")),
    "streaming/lane_order.py",
}
# Modules that hash existing data with the same functions and draw nothing.
HASHING_MODULES = {"preparation/dedup/near_duplicates.py"}
# Modules that change or move tokens on request.
CHANGING_MODULES = {
    "batches/assembly/augment.py",
    "preparation/documents/fill_in_the_middle.py",
}
SYNTHETIC_DATA_READERS = {"store/read/synthetic_store.py", "preparation/synthetic_run.py"}
DRAWING_MODULES = {
    # Draws the numbers of a sample of records, as ms-swift draws them.
    "sources/files/part_stream.py",
    "train/model/gpt_model.py",
    "train/demo_run.py",
    "examples/job.py",
    "adapters/fsdp2/fsdp2_trainer.py",
    # Draws the token of a server's pages.
    "view/server.py",
}
DRAWING_FUNCTIONS = {"Generator", "default_rng", "manual_seed", "multinomial", "rand", "randint", "randn"} | {
    *("normal_", "uniform_", "random_", "randperm", "urandom", "getrandbits", "token_bytes"),
    *("rand_like", "randint_like", "bernoulli", "RandomState", "uuid4"),
}


def find_random_sources(path: Path) -> set[str]:
    """Return the random sources that a file uses."""
    modules = {module for _, module in list_imports(path)}
    sources = {m for m in modules if m.split(".")[0] in ("random", "secrets", "uuid")}
    for node in parse_nodes(path):
        if isinstance(node, ast.Attribute) and node.attr in {*DRAWING_FUNCTIONS, "random"}:
            sources.add(node.attr)
    return sources | {m for m in modules if "random" in m.split(".")}


def find_importers(module: str, *names: str) -> set[str]:
    """Return the files that import a batchloom module, or these names of it."""
    return {
        str(path.relative_to(SOURCE))
        for path in MODULES
        for node in parse_nodes(path)
        if isinstance(node, ast.ImportFrom) and node.module == module
        if not names or {alias.name for alias in node.names} & set(names)
    }


def test_few_modules_draw_random_data():
    assert {str(p.relative_to(SOURCE)) for p in MODULES if find_random_sources(p)} == DRAWING_MODULES
    assert find_importers("batchloom.core.keyed_hashing") == SYNTHESIZING_MODULES | HASHING_MODULES | CHANGING_MODULES
    assert find_importers("batchloom.core.synthetic_data", "SyntheticDocuments") == SYNTHETIC_DATA_READERS


@pytest.mark.parametrize(
    "line",
    [
        "import random",
        "from random import choice",
        "import numpy.random",
        "from numpy.random import default_rng",
        "ids = np.random.randint(0, 9, 9)",
        "ids = torch.randint(9, (9,))",
        "ids = os.urandom(9)",
    ],
)
def test_the_rule_on_random_data_detects_it(tmp_path, line):
    copy = tmp_path / "reader.py"
    text = (SOURCE / "store" / "read" / "store_reader.py").read_text()
    copy.write_text(f"{text}\n\ndef late():\n    {line}\n")
    assert find_random_sources(copy)


def _run_in_new_process(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return result.stdout


def test_importing_batchloom_is_light():
    loaded = json.loads(
        _run_in_new_process("import sys, json; import batchloom; print(json.dumps(sorted(sys.modules)))")
    )
    own_modules = [name for name in loaded if name.startswith("batchloom")]
    assert own_modules == ["batchloom"]
    for heavy in (
        "torch",
        "pyarrow",
        "numpy",
        "tokenizers",
        "fastokens",
        "splintr",
        "pydantic",
        "rich",
        "click",
    ):
        assert heavy not in loaded
    assert len(loaded) < 150


def test_opening_and_loading_a_store_needs_no_heavy_module(tmp_path):
    from batchloom.testing import write_store

    write_store(tmp_path / "s", [[1, 2, 3], [4, 5]])
    code = (
        "import sys, json, batchloom;"
        f"l = batchloom.Loader(batchloom.open_store({str(tmp_path / 's')!r}), seq_len=4, global_batch_size=1,"
        "output='numpy', rank=0, world_size=1);"
        "next(iter(l)); print(json.dumps(sorted(sys.modules)))"
    )
    loaded = json.loads(_run_in_new_process(code))
    for heavy in (
        "torch",
        "pyarrow",
        "tokenizers",
        "fastokens",
        "splintr",
        "pydantic",
        "rich",
        "click",
        "asyncio",
    ):
        assert heavy not in loaded


def test_importing_compat_is_light():
    loaded = json.loads(
        _run_in_new_process("import sys, json; import batchloom.compat; print(json.dumps(sorted(sys.modules)))")
    )
    for heavy in ("torch", "pyarrow", "transformers", "datasets", "huggingface_hub"):
        assert heavy not in loaded


def test_public_names_are_listed():
    assert sorted(batchloom.__all__) == batchloom.__all__
    assert set(batchloom._HOMES) == set(batchloom.__all__)
    assert len(batchloom.__all__) <= 25
    public = {name for name in vars(batchloom) if not name.startswith("_")}
    allowed = {"TYPE_CHECKING", "importlib"} | set(batchloom._HOMES)
    modules = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    assert public <= allowed | modules


@pytest.mark.parametrize("name", sorted(batchloom.__all__))
def test_public_names_exist_and_are_documented(name):
    assert getattr(batchloom, name).__doc__
    assert name in (SOURCE.parent.parent / "docs/reference/python.md").read_text()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'lodaer'"):
        batchloom.lodaer  # noqa: B018


# Modules that the documentation names, in addition to the packages and their interfaces.
PUBLIC_MODULES = re.compile(r"batchloom\.batches\.(forms|masks|metrics)")
TESTS = Path(__file__).parent
# The aim is 80; lower it with every file that switches to an interface.
MOST_WITH_PRIVATE_IMPORTS = 84


@functools.cache
def list_exports(package: str) -> set[str]:
    """Return the names that a package exports."""
    stub = SOURCE.parent / package.replace(".", "/") / "__init__.pyi"
    if not stub.exists():
        return set()
    return {alias.name for node in parse_nodes(stub) if isinstance(node, ast.ImportFrom) for alias in node.names}


@pytest.mark.parametrize("stub", sorted(SOURCE.rglob("__init__.pyi")), ids=get_package_path)
def test_an_interface_holds_what_it_lists(stub):
    name = get_package_path(stub)
    package = importlib.import_module(name)
    assert [name for name in list_exports(name) if not hasattr(package, name)] == []
    modules_by_name = {
        alias.name: node.module
        for node in parse_nodes(stub)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    # Importing a sub-module of the same name would replace the exported name.
    modules = {path.stem for path in stub.parent.glob("*.py")}
    assert {name for name in modules & modules_by_name.keys() if modules_by_name[name] != name} == set()


def iter_statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements; expressions, which hold none, are most of the nodes."""
    for field in ("body", "orelse", "finalbody", "handlers"):
        nodes = getattr(tree, field, [])
        for node in nodes if isinstance(nodes, list) else []:
            yield node
            yield from iter_statements(node)


def find_private_imports(path: Path) -> set[str]:
    """Return the private modules and names that a test imports."""
    private_names = set()
    for node in iter_statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, name in names:
            parts = module.split(".")
            if parts[0] != "batchloom" or len(parts) == 1 or parts[1] in OPEN_PACKAGES:
                continue
            is_private = module not in PACKAGES or (
                (SOURCE.parent / module.replace(".", "/") / f"{name}.py").exists() and name not in list_exports(module)
            )
            full_name = f"{module}.{name}" if module in PACKAGES else module
            if is_private and not PUBLIC_MODULES.fullmatch(full_name):
                private_names.add(f"{module}.{name}".removesuffix("."))
    return private_names


@pytest.mark.parametrize(
    ("line", "private"),
    [
        ("from batchloom import Loader", False),
        ("from batchloom.store import read_manifest", False),
        ("from batchloom.batches import forms", False),
        ("from batchloom.adapters.pytorch import LoaderDataset", False),
        ("from batchloom.store.format.manifest import read_manifest", True),
        ("from batchloom.store.format import layout", True),
        ("import batchloom.store.format.manifest", True),
    ],
)
def test_the_rule_on_private_imports_detects_them(tmp_path, line, private):
    (tmp_path / "test_line.py").write_text(f"def late():\n    {line}\n")
    assert bool(find_private_imports(tmp_path / "test_line.py")) == private


def test_most_tests_use_public_names():
    """Limit the files with private imports; only tests of inner algorithms need them."""
    imports_by_file = {
        str(path.relative_to(TESTS)): sorted(imports)
        for path in sorted(TESTS.rglob("*.py"))
        if (imports := find_private_imports(path))
    }
    assert len(imports_by_file) <= MOST_WITH_PRIVATE_IMPORTS, json.dumps(imports_by_file, indent=1)


def test_no_parameter_of_a_test_depends_on_the_time():
    """Two processes that collect the tests a second apart must name them alike: gzip files hold their time."""
    wrong = []
    for path in sorted(TESTS.rglob("test_*.py")):
        if "gzip.compress(" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                calls = [call for call in ast.walk(decorator) if isinstance(call, ast.Call)]
                wrong += [
                    f"{path.relative_to(TESTS)}:{call.lineno}: give gzip.compress mtime=0"
                    for call in calls
                    if ast.unparse(call.func) == "gzip.compress" and "mtime" not in {word.arg for word in call.keywords}
                ]
    assert wrong == []


def test_docstring_summaries_are_short_and_open_with_a_verb_or_noun():
    """Limit summaries to 80 characters that do not open with a question word."""
    wrong = []
    for path in MODULES:
        for node in parse_nodes(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                summary = (ast.get_docstring(node) or "").partition("\n")[0]
                opening = summary.partition(" ")[0]
                if len(summary) > 80 or opening in ("What", "Whether", "Where", "Which", "How", "Who", "Whose"):
                    wrong.append(f"{path.relative_to(SOURCE)}: {summary}")
    assert wrong == []


def test_exported_names_have_docstrings():
    """Require docstrings of the names in an interface; internal names may have none."""
    missing = []
    for path in MODULES:
        stub = path.with_name("__init__.pyi")
        exported = set(re.findall(r"(\w+) as ", stub.read_text())) if stub.exists() else set()
        missing += [
            f"{path.relative_to(SOURCE)}: {node.name}"
            for node in parse_nodes(path)[0].body
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
            and node.name in exported
            and not ast.get_docstring(node)
        ]
    assert missing == []
