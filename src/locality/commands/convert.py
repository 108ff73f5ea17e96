"""`locality convert`: weights from one layout into another."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

from locality.commands.parsing import Parser, add_settings, read_settings


def main(arguments: Sequence[str]) -> None:
    """Convert and say what was done."""
    from locality.checkpoints import LAYOUTS, convert, save
    from locality.checkpoints.conversion import check_target
    from locality.commands.opening import open_anything
    from locality.training import RunFolder
    from locality.training.runs import is_run_folder

    parser = Parser(
        "convert",
        "Read weights of any known layout, recognised from the names of their tensors, and write "
        "them in another. Nothing in a pickled file is ever executed.",
    )
    parser.add_argument("source", help="file, folder, or run folder")
    parser.add_argument("target", help="folder, or a file ending in .safetensors or .pth")
    parser.add_argument("--to", default="locality", help=f"one of: {', '.join(_names(LAYOUTS))}")
    parser.add_argument("--model", default=None, help="architecture, if the weights do not tell")
    parser.add_argument("--entry", default=None, help="which state dict, if the file has several")
    add_settings(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace the target")
    options = parser.read(arguments)
    choices = {
        "model": options.model,
        "entry": options.entry,
        "overwrite": options.overwrite,
        "settings": read_settings(options),
    }
    if not is_run_folder(options.source):
        print(convert(options.source, options.target, options.to, **choices))
        return
    check_target(Path(options.target), options.to, options.overwrite)
    # A run becomes a saved model with a card from its own figures, and that is converted.
    opened = open_anything(options.source)
    with tempfile.TemporaryDirectory() as folder:
        final = options.to == "locality" and not Path(options.target).suffix
        saved = save(
            opened.model,  # type: ignore[arg-type]
            options.target if final else folder,
            card=RunFolder(options.source).result(),
            preprocessing=opened.preprocessing,
            classes=opened.classes,
        )
        if final:
            print(saved)
        else:
            done = convert(saved, options.target, options.to, **choices)
            print(dataclasses.replace(done, source=Path(options.source)))


def _names(layouts: object) -> list[str]:
    return [getattr(layout, "name", layout) for layout in layouts]  # type: ignore[attr-defined]
