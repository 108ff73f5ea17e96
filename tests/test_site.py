"""Links between pages resolve, and the site that `make docs` builds is complete."""

import ast
import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
PACKAGES = [
    "locality",
    *(f"locality.{name}" for name in ("analysis", "checkpoints", "data", "figures", "layers")),
    *(f"locality.{name}" for name in ("models", "training")),
]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """A page's link anchors: headings as on GitHub and the site, and ids."""
    titles = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return named | set(re.findall(r'<a id="([^"]+)"', prose(page)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, anchor = urldefrag(target)
        if urlparse(target).scheme:
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def public_names(package: str) -> set[str]:
    module = importlib.import_module(package)
    if hasattr(module, "__all__"):
        names = set(module.__all__)
    else:
        source = ast.parse(Path(str(module.__file__)).read_text())
        imported = [node for node in source.body if isinstance(node, ast.ImportFrom)]
        names = {each.asname for node in imported for each in node.names if each.asname}
        own = vars(module).items()
        names |= {name for name, value in own if getattr(value, "__module__", "") == package}
    return {name for name in names if not name.startswith("_")}


class Html(HTMLParser):
    """Ids, links and loaded files of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if "href" in given:
            self.links.add(given["href"])
        if "src" in given:
            self.loaded.add(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.add(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[Path, Html]:
    """The pages of the site, built without warnings."""
    pytest.importorskip("mkdocstrings", reason="`make docs` installs what builds the site")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    built = subprocess.run(
        [*command, "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return {page: Html(page) for page in sorted(folder.rglob("*.html"))}


@pytest.mark.slow
def test_every_public_name_has_an_entry(site):
    entries = set().union(*(page.ids for page in site.values()))
    wanted = {f"{package}.{name}" for package in PACKAGES for name in public_names(package)}
    # Names that the pages' snippets import are public, too.
    for page in PAGES:
        for module, names in re.findall(
            r"^from (locality\S*) import ([\w, ]+)$", page.read_text(), flags=re.MULTILINE
        ):
            wanted |= {f"{module}.{name}" for name in names.split(", ")}
    assert len(wanted) > 90
    assert not wanted - entries


@pytest.mark.slow
def test_the_site_has_no_dead_link_and_loads_nothing_from_elsewhere(site):
    for page, html in site.items():
        if page.name == "404.html":  # its links assume a server's root
            continue
        assert not [each for each in html.loaded if urlparse(each).netloc], page.name
        for link in html.links | html.loaded:
            if urlparse(link).scheme:
                continue
            address, anchor = urldefrag(urljoin(page.as_uri(), link))
            there = Path(unquote(urlparse(address).path))
            assert there.exists(), f"{page.name}: {link}"
            if anchor and there in site:
                assert unquote(anchor) in site[there].ids, f"{page.name}: {link}"
