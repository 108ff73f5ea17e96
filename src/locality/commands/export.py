"""`locality export`: a graph that runs without this library."""

from __future__ import annotations

from collections.abc import Sequence

from locality.commands.parsing import Parser
from locality.errors import UserError


def main(arguments: Sequence[str]) -> None:
    """Export and print the path."""
    parser = Parser(
        "export",
        "Write a model as an ONNX graph or a torch.export program, for any batch size (and any "
        "image size, where the model takes any).",
    )
    parser.add_argument("model", help="run folder, weights, or the name of public weights")
    parser.add_argument("output", help="file ending in .onnx or .pt2")
    parser.add_argument("--format", default="onnx", help="onnx or torch-export")
    parser.add_argument("--variant", default=None, help="architecture, if the weights do not tell")
    options = parser.read(arguments)

    from locality.checkpoints import export
    from locality.commands.opening import open_anything

    opened = open_anything(options.model, options.variant)
    if opened.model is None:
        raise UserError(f"{options.model} is an exported graph already")
    print(
        export(
            opened.model,
            options.output,
            options.format,
            preprocessing=opened.preprocessing,
            classes=opened.classes,
        )
    )
