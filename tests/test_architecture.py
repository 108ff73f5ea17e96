"""Imports point downwards, no two files import each other, and exports are complete."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import locality

SOURCE = Path(locality.__file__).parents[1]

# Each may import those below it, at the top of a file or in a function. The study is one part.
ORDER = [
    "locality_papers",
    "__main__",
    "cli",
    "commands",
    "pages",
    "serve",
    "report",
    "runner",
    "figures",
    "transformers",
    "analysis",
    "training",
    "timm",
    "checkpoints",
    "runs",
    "predictions",
    "data",
    "models",
    "layers",
]
LEAVES = {"errors", "files", "templates", "checks", "settings", "machine", "progress"}
FILES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for top in ("locality", "locality_papers")
    for path in (SOURCE / top).rglob("*.py")
}


def package(module):
    """The part of the library a module is in, "" for its top level; the study is one part."""
    top, _, rest = module.partition(".")
    return rest.partition(".")[0] if top == "locality" else top


def imports(node, inside=False):
    """A tree's imports, type-checking ones included: (module, whether inside a function)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            # `locality` imports its public names when they are used.
            names = {alias.name for alias in child.names} - {"locality"}
            yield from ((name, inside) for name in names)
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, "relative imports hide what they point to"
            for alias in child.names:
                name = f"{child.module}.{alias.name}"
                if name not in ("locality.__version__", "locality.lazily"):
                    yield (name if name in FILES else child.module), inside
        else:
            yield from imports(child, inside or isinstance(child, ast.FunctionDef | ast.Lambda))


IMPORTS = {name: sorted(set(imports(ast.parse(path.read_text())))) for name, path in FILES.items()}
OWN = {name: [m for m, _ in found if m in FILES] for name, found in IMPORTS.items()}


def test_every_package_has_its_place():
    assert {package(name) for name in FILES} == {"", *ORDER, *LEAVES}


def test_imports_point_downwards():
    wrong = [
        f"{name} imports {other}"
        for name, others in OWN.items()
        for other in others
        if package(name) in ORDER and package(other) in ORDER and package(name) != package(other)
        if ORDER.index(package(other)) < ORDER.index(package(name))
    ]
    wrong += [
        f"{name} imports {other}"
        for name, others in OWN.items()
        for other in others
        if package(name) in LEAVES and package(other) not in LEAVES
    ]
    assert not wrong


def test_the_library_names_the_study_in_the_table_of_commands_alone():
    named = {name for name, path in FILES.items() if "locality_papers" in path.read_text()}
    assert {name for name in named if package(name) != "locality_papers"} == {"locality.cli"}


def test_no_files_import_each_other():
    try:
        TopologicalSorter(OWN).prepare()
    except CycleError as error:
        pytest.fail(" ← ".join(error.args[1]))


def test_only_commands_import_our_own_inside_functions():
    """There, it makes starting fast; elsewhere, it would hide a cycle."""
    inside = {name for name, found in IMPORTS.items() for other, lazy in found
              if lazy and other in FILES and package(name)}  # fmt: skip
    allowed = {"commands", "cli"}
    assert {package(name) for name in inside - {"locality_papers.commands"}} <= allowed, inside


def test_only_figures_and_the_study_import_matplotlib():
    drawing = {name for name, found in IMPORTS.items() for other, _ in found
               if other.partition(".")[0] == "matplotlib"}  # fmt: skip
    assert {package(name) for name in drawing} == {"figures", "locality_papers"}


def test_public_names_exist_and_others_do_not():
    for name in locality.__all__:
        assert getattr(locality, name) is not None and name in dir(locality)
    assert callable(locality.open) and "open" not in locality.__all__
    assert not {"re", "importlib", "lazily"} & {*dir(locality)}
    with pytest.raises(AttributeError, match="create_modell"):
        locality.create_modell  # noqa: B018
