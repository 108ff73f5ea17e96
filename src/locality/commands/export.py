"""`locality export`: a graph that runs without this library."""

from __future__ import annotations

from collections.abc import Sequence

from locality.commands.parsing import MODEL, Parser, add_model_options


def main(arguments: Sequence[str]) -> None:
    """Export and print the path."""
    parser = Parser(
        "export",
        "Write a model as an ONNX graph or a torch.export program, for any batch size (and any "
        "image size, where the model takes any).",
    )
    parser.add_argument("model", help=MODEL)
    parser.add_argument("output", help="file ending in .onnx or .pt2")
    parser.add_argument("--format", default="onnx", help="onnx or torch-export")
    add_model_options(parser)
    options = parser.read(arguments)

    from locality.checkpoints import export
    from locality.commands.opening import open_given

    opened = open_given(options.model, options)
    print(
        export(
            opened.module(),
            options.output,
            options.format,
            preprocessing=opened.preprocessing,
            classes=opened.classes,
        )
    )
