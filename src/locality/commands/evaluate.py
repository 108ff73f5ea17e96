"""`locality eval`: accuracy of a run, or of any weights on any data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from locality.commands.parsing import Parser, with_aliases
from locality.errors import UserError

if TYPE_CHECKING:
    from locality.data import DataConfig


def main(arguments: Sequence[str]) -> None:
    """Evaluate and print top-1, top-5, loss and the number of images."""
    from locality.data import DataConfig

    parser = Parser(
        "eval",
        "Top-1 and top-5 accuracy of a run (on its own data unless told otherwise), of a weight "
        "file in any known layout, or of public weights.",
    )
    parser.add_argument("run", nargs="?", default=None, help="a run folder")
    parser.add_argument("--weights", default=None, help="a weight file, saved folder or name")
    parser.add_argument("--variant", default=None, help="architecture, if the weights do not tell")
    parser.add_argument("--img_size", type=int | None, default=None, help="side in pixels")
    parser.add_argument("--batch_size", type=int, default=256, help="images at once")
    parser.add_argument("--precision", default="fp32", help="fp32, bf16-mixed or auto")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_class_arguments(DataConfig, "data")
    words = with_aliases(arguments, {"--data": "--data.dataset"})
    options = parser.read(words)
    if (options.run is None) == (options.weights is None):
        raise UserError("give either a run folder or --weights, to say what to evaluate")
    if options.run is not None:
        from locality.training import RunFolder, evaluate_run

        own = RunFolder(options.run).config().data
        given = {word.partition("=")[0] for word in words}
        if "--data.dataset" not in given or options.data.dataset == own.dataset:
            # Options change the run's own data; another dataset starts from nothing.
            parser.set_defaults({f"data.{name}": value for name, value in vars(own).items()})
            options = parser.read(words)
        result = evaluate_run(
            options.run,
            DataConfig(**vars(options.data)),
            img_size=options.img_size,
            batch_size=options.batch_size,
            precision=options.precision,
        )
    else:
        result = _evaluate_weights(options, DataConfig(**vars(options.data)))
    if options.json:
        print(json.dumps(result))
        return
    print(
        f"top-1 {result['top1']:.2f}%  top-5 {result['top5']:.2f}%  loss {result['loss']:.4f}  "
        f"on {result['n']} images of {result['dataset']}"
    )


def _evaluate_weights(options: Any, data: DataConfig) -> dict[str, Any]:
    """Accuracy of opened weights on a dataset, with the preprocessing that belongs to them."""
    from locality.commands.opening import open_anything
    from locality.data import open_data
    from locality.training import evaluate_on

    opened = open_anything(options.weights, options.variant)
    if opened.model is None:
        raise UserError(f"{options.weights} is an exported graph; evaluate what it came from")
    splits = open_data(data, seed=0)
    if len(splits.classes) != opened.model.num_classes:
        raise UserError(
            f"{options.weights} tells {opened.model.num_classes} classes apart and dataset "
            f"'{data.dataset}' has {len(splits.classes)}; give --data.dataset with the same ones"
        )
    return evaluate_on(
        opened.model,
        splits,
        data,
        opened.preprocessing.at(options.img_size or opened.preprocessing.size),
        batch_size=options.batch_size,
        precision=options.precision,
    )
