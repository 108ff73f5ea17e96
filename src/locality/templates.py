"""Pages from a package's templates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from locality.files import write_output

PAGE_MARK = b'<meta name="generator" content="locality'
"""What the pages of every command begin with, by which they may be replaced."""


def render(
    package: str, template: str, filters: Mapping[str, Callable[..., Any]] = {}, **content: Any
) -> str:
    """A page from one of a package's `templates`; what the template asks for has to be given.

    Args:
        package: such as "locality.report".
        template: the file's name.
        filters: functions that the template may put values through.
        content: the values; in HTML they are escaped unless they are markup.
    """
    environment = _environment(package, template.endswith(".html"))
    environment.filters |= filters
    return environment.get_template(template).render(content)


@functools.cache
def _environment(package: str, escaped: bool) -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        autoescape=escaped,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def write_page(path: Path | str, text: str, overwrite: bool = False) -> Path:
    """Write a page, atomically, and make its folder; the page's path.

    Raises:
        UserError: if something else stands there, and is not to be overwritten.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, text, PAGE_MARK, overwrite)
    return path
