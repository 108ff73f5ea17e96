"""The notebooks run from top to bottom and show their results."""

import ast
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def cells(notebook):
    content = json.loads(notebook.read_text())
    assert content["nbformat"] == 4
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def run(source, names):
    """A cell's last value."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is None:
        return ""
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_they_run_from_top_to_bottom(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    shown = [run("".join(cell["source"]), names) for cell in cells(notebook)]
    assert sum("<iframe" in each for each in shown) == 2
    assert "data:image/png" in "".join(shown)
    if notebook.stem == "heads":
        assert names["accuracy"]["as it is"] > 0.3  # chance is 0.1
