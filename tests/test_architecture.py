"""The rooms import in one direction, and the package says what it exports."""

import ast
from pathlib import Path

import pytest

import locality

SOURCE = Path(locality.__file__).parent

# Earlier rooms know nothing of later ones. Names on one line may not import each other.
ORDER = [
    {"errors", "files", "checks", "lazy", "machine", "settings", "_version"},
    {"data", "layers"},
    {"models"},
    {"checkpoints"},
    {"timm", "search", "benchmark", "training"},
    {"analysis"},
    {"figures"},
    {"runner"},
    {"papers"},
    {"report"},
    {"commands"},
    {"cli"},
    {"__main__", "__init__"},
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}


def room_of(module: str) -> str:
    return module.split(".")[1] if module.count(".") else "__init__"


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name == "locality" or name.startswith("locality.")}


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE))
)
def test_imports_point_to_earlier_rooms(path):
    own = path.relative_to(SOURCE).with_suffix("").parts[0]
    assert own in LEVEL, f"{own} is no room of the house"
    for name in imports(path):
        other = room_of(name)
        if other in ("__version__", "_version") or other == own or own == "__init__":
            continue
        leaves = {own, other} <= ORDER[0]
        assert leaves or LEVEL[other] < LEVEL[own], f"{own} imports {name}, not an earlier room"


def test_leaves_import_nothing_but_leaves():
    for leaf in ORDER[0]:
        path = SOURCE / f"{leaf}.py"
        assert path.exists()
        assert {room_of(name) for name in imports(path)} <= ORDER[0]


@pytest.mark.parametrize("name", locality.__all__)
def test_public_names_exist(name):
    assert getattr(locality, name) is not None
    assert name in dir(locality)


def test_other_names_do_not():
    with pytest.raises(AttributeError, match="create_modell"):
        locality.create_modell  # noqa: B018
