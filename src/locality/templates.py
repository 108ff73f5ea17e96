"""Render pages from a package's templates; pictures inside of them."""

import base64
import functools
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from locality import __version__
from locality.errors import printable
from locality.files import write_atomic


def render(
    package: str, template: str, filters: Mapping[str, Callable[..., Any]] = {}, **content: Any
) -> str:
    """Render one of a package's `templates`; undefined variables are errors.

    Args:
        package: for example "locality.report".
        template: filename.
        filters: additional Jinja filters.
        content: variables besides `version`; escaped in HTML unless they are markup.
    """
    environment = _environment(package, template.endswith(".html"))
    environment.filters |= filters
    environment.globals["version"] = __version__
    return environment.get_template(template).render(content)


@functools.cache
def _environment(package: str, escaped: bool) -> Any:
    import jinja2

    packages = (package, "locality")  # base.html and the colours are all pages'
    return jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name) for name in packages]),
        autoescape=escaped,
        finalize=_visible if escaped else None,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _visible(value: Any) -> Any:
    """Text without control characters, which names may contain; not markup."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return printable(value, keep="\n") if is_text else value


def write_page(path: Path | str, text: str) -> Path:
    """Write or replace a page atomically, creating its folder; returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
    return path


def data_url(pixels: Any) -> str:
    """(H, W, 3) uint8 as a data URL: PNG up to 64 pixels, else JPEG."""
    from PIL import Image

    buffer = io.BytesIO()
    name = "png" if max(pixels.shape) <= 64 else "jpeg"
    Image.fromarray(pixels).save(buffer, format=name, quality=88, optimize=True)
    return f"data:image/{name};base64,{base64.b64encode(buffer.getvalue()).decode()}"
