"""Index of the tests of each module: ``python tests/index.py`` writes INDEX.md.

Tests are found by the names that they import. Packages are lazy, and their stubs say which module defines a name, so
that nothing is imported for it.
"""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src"
INDEX = TESTS / "INDEX.md"
_MOST_LISTED = 5
_INTRODUCTION = """# Tests of each module

At most five tests that import names of the module, those of its own folder first. `python tests/index.py` writes this
page.
"""


def read_definitions() -> dict[tuple[str, str], tuple[str, str]]:
    """Return the module, and the name there, that a package exports under a name, as its stub says."""
    exported = {}
    for stub in SOURCE.rglob("__init__.pyi"):
        package = ".".join(stub.parent.relative_to(SOURCE).parts)
        for node in ast.parse(stub.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                parents = package.split(".")[: -(node.level - 1) or None]
                module = ".".join([*parents, *([node.module] if node.module else [])])
                exported.update({(package, alias.asname or alias.name): (module, alias.name) for alias in node.names})
    for node in ast.parse((SOURCE / "batchloom/__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            homes = ast.literal_eval(node.value)
            exported.update({("batchloom", name): (module, name) for name, module in homes.items()})
    return exported


def find_module(module: str, name: str, definitions: dict[tuple[str, str], tuple[str, str]]) -> str:
    """Return the module that defines a name which is imported from a module or package."""
    while (module, name) in definitions:
        module, name = definitions[module, name]
    is_module = (SOURCE / f"{module}.{name}".replace(".", "/")).with_suffix(".py").is_file()
    return f"{module}.{name}" if is_module else module


def find_tested_modules(path: Path, definitions: dict[tuple[str, str], tuple[str, str]]) -> set[str]:
    """Return the modules whose names a test uses."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "batchloom":
            modules |= {find_module(node.module, alias.name, definitions) for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "batchloom":
            modules.add(find_module("batchloom", node.attr, definitions))
    return modules


def make_index() -> str:
    """Return the page that lists the tests of each module."""
    definitions = read_definitions()
    tests: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for module in find_tested_modules(path, definitions):
            tests.setdefault(module, []).append(path.relative_to(TESTS).as_posix())
    lines = []
    package = ""
    for path in sorted(SOURCE.rglob("*.py"), key=lambda path: (path.parent, path)):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        if module not in tests:
            continue
        folder = path.parent.relative_to(SOURCE / "batchloom").as_posix()
        if folder != package:
            package = folder
            lines.append(f"\n## {package}\n")
        own_folder = f"{folder.partition('/')[0]}/"
        files = sorted(tests[module], key=lambda name: not name.startswith(own_folder))[:_MOST_LISTED]
        lines.append(f"- `{path.name}`: {', '.join(f'`{name}`' for name in files)}")
    return _INTRODUCTION + "\n".join(lines) + "\n"


if __name__ == "__main__":
    INDEX.write_text(make_index())
