"""`locality convert`: a model from wherever it is into a layout of one's choice."""

from __future__ import annotations

from collections.abc import Sequence

from locality.commands.parsing import MODEL, Parser, add_model_options, read_settings, with_aliases


def main(arguments: Sequence[str]) -> None:
    """Convert and say what was done."""
    from locality.checkpoints import LAYOUTS, convert

    parser = Parser(
        "convert",
        "Read a model, weights of any known layout, recognised from the names of their tensors, "
        "and write it in another. Nothing in a pickled file is ever executed.",
    )
    parser.add_argument("source", help=MODEL)
    parser.add_argument("target", help="folder, or a file ending in .safetensors or .pth")
    parser.add_argument("--to", default="locality", help=f"one of: {', '.join(LAYOUTS)}")
    add_model_options(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace the target")
    options = parser.read(with_aliases(arguments, {"--model": "--variant"}))
    done = convert(
        options.source,
        options.target,
        options.to,
        options.variant,
        options.entry,
        options.overwrite,
        read_settings(options),
    )
    print(done)
