"""What the site has beside the pages of docs/: the README, and a reference of every public name.

Nothing is written twice. Pages at the top of the repository become pages of the site, links are
made to point there, and other files that pages link to are put beside them as text. The reference
lists names; mkdocstrings takes what it says of them from the docstrings, without importing them.
The pages beside `live.md` compute models: those of `docs/live/`, and two of the package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from PIL import Image

from locality.analysis.explorer import live_page
from locality.checkpoints import open_model

ROOT = Path(__file__).parents[1]
TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
REFERENCE = {
    "locality": ["locality", "locality.errors"],
    "models": ["locality.models"],
    "layers": [f"locality.layers.{module}" for module in ("position", "block", "fast")],
    "checkpoints": ["locality.checkpoints"],
    "transformers": ["locality.transformers"],
    "data": ["locality.data"],
    "training": ["locality.training"],
    "analysis": ["locality.analysis", "locality.analysis.measures"],
    "figures": ["locality.figures"],
    "runner": [f"locality.runner.{module}" for module in ("runs", "comparison")],
    "locality_papers": [
        f"locality_papers.{module}"
        for module in (
            "experiment",
            "runs",
            "table",
            "measures",
            "reproduce",
            "search.space",
            "search.run",
        )
    ],
}
PACKAGED = ("convit_photo.tiny_in200", "deit_photo.tiny_in200")
LINK = re.compile(r"""((?<=\]\()|(?<=src=")|(?<=href="))([^)"#:\s]+)(?=[)"#])""")
# An entry for several names, with the deeper lines that go on with it.
JOINT = re.compile(r"^( +)(\w+(?:, \w+)+)(: .*(?:\n\1 +.*)*)", re.MULTILINE)


def public_names(module: str) -> list[str]:
    """What a module gives: `__all__`, the names imported `as` themselves, or those it defines.

    Of a module's own constants, those that have a docstring.
    """
    path = ROOT / "src" / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    defined = []
    for node, following in pairwise([*tree.body, ast.Pass()]):
        match node:
            case ast.Assign(targets=[ast.Name("__all__")]):
                return list(ast.literal_eval(node.value))
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                defined.append(name)
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                if isinstance(following, ast.Expr):
                    defined.append(name)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    given = [each.name for node in imports for each in node.names if each.asname == each.name]
    return given or [name for name in defined if not name.startswith("_")]


def reference(modules: list[str]) -> str:
    """The page of a package, in mkdocstrings' directives."""
    lines = []
    for module in modules:
        lines += [f"{'##' if lines else '#'} {module}", ""]
        options = "{members: false, show_root_heading: false, show_root_toc_entry: false}"
        lines += [f"::: {module}", f"    options: {options}", ""]
        for name in public_names(module):
            lines += [f"::: {module}.{name}", ""]
    return "\n".join(lines)


def linked(source: str) -> Iterator[tuple[str, str]]:
    """The files that a page of the repository links to or shows: as written, and from the root."""
    text = (ROOT / source).read_text(encoding="utf-8")
    for _, target in LINK.findall(text):
        path = normpath(PurePosixPath(source).parent / target)
        if (ROOT / path).is_file():
            yield target, path


def place_of(path: str) -> str:
    """Where a file of the repository is on the site.

    What is no page is put beside the pages, as text unless browsers show its kind.
    """
    if path in TOP:
        return TOP[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    shown = PurePosixPath(path).suffix in (".png", ".svg", ".csv", ".json", ".ipynb")
    return f"files/{path}" if shown else f"files/{path}.txt"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = [*(f"docs/{file.src_uri}" for file in files.documentation_pages()), *TOP]
    for path in sorted({path for page in pages for _, path in linked(page)}):
        if (place := place_of(path)).startswith("files/"):
            files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    for source, place in TOP.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    for name, modules in REFERENCE.items():
        page = File.generated(config, f"reference/{name}.md", content=reference(modules))
        files.append(page)
    for folder in sorted((ROOT / "docs/live").iterdir()):
        content = computed_page(folder)
        files.append(File.generated(config, f"{folder.name}.html", content=content))
    return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    for entry in config.nav or []:
        if "Reference" in entry:
            entry["Reference"] = [{name: f"reference/{name}.md"} for name in REFERENCE]
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they hold in the repository → as they hold on the site."""
    place = page.file.src_uri
    if place.startswith("reference/"):
        return markdown
    source = {value: key for key, value in TOP.items()}.get(place, f"docs/{place}")
    paths = dict(linked(source))
    if place == "findings.md" or place.startswith("results/"):
        page.meta["hide"] = ["toc"]  # tables need the width

    def moved(found: re.Match[str]) -> str:
        if found[2] not in paths:
            return found[2]
        return relpath(place_of(paths[found[2]]), PurePosixPath(place).parent)

    def local(found: re.Match[str]) -> str:
        page = files.get_file_from_path(f"{found[1]}.md") or files.get_file_from_path(
            found[1] + ".html"
        )
        assert page is not None, f"{source}: no page {found[1]}"
        return relpath(page.src_uri, PurePosixPath(place).parent)

    markdown = re.sub(rf"{re.escape(config.site_url)}([\w/]+)\.html", local, markdown)
    return LINK.sub(moved, markdown)


def computed_page(folder: Path) -> str:
    """A live page of a folder of `docs/live/`: its images; its models, or else the package's."""
    own = sorted(path for path in folder.iterdir() if path.is_dir())
    subjects = [open_model(model) for model in own or PACKAGED]
    strip = Image.open(folder / "examples.png")  # square images, one beside the other
    side, classes = strip.height, subjects[0].classes or ()
    images = [strip.crop((x, 0, x + side, side)) for x in range(0, strip.width, side)]
    labels = [classes[index % len(classes)] for index in range(len(images))] if own else []
    about = '<p><a href="live.html">About this page</a></p>'
    return live_page(subjects, images, labels, digits=folder.name == "digits", about=about)


class OneEntryPerName(Extension):
    """Docstrings' `rank, world_size: …` as the two entries that the parser wants."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = JOINT.sub(
                lambda found: "\n".join(
                    f"{found[1]}{name}{found[3]}" for name in found[2].split(", ")
                ),
                obj.docstring.value,
            )
