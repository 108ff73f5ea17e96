"""The notebooks run from top to bottom in a fresh interpreter, and end above their baselines."""

import ast
import json
import subprocess
import sys
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


def check(notebook):
    names = {"__name__": "__main__"}
    shown = [run("".join(cell["source"]), names) for cell in cells(notebook)]
    assert sum("<iframe" in each for each in shown) == 2
    assert "data:image/png" in "".join(shown)
    from locality.analysis.baselines import read_baselines
    from locality.runs import Run

    runs = [value for value in names.values() if isinstance(value, Run)]
    for trained in runs:
        assert trained.result["top1"] > max(read_baselines(trained.path).values()), trained
    assert runs


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_they_run_from_top_to_bottom(notebook, tmp_path):
    done = subprocess.run([sys.executable, __file__, notebook], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


if __name__ == "__main__":
    check(Path(sys.argv[1]))
