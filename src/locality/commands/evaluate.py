"""`locality eval`: accuracy of a run, or of any weights on any data."""

from __future__ import annotations

import json
from collections.abc import Sequence

from locality.commands.parsing import MODEL, Parser, add_model_options, with_aliases
from locality.errors import UserError


def main(arguments: Sequence[str]) -> None:
    """Evaluate and print top-1, top-5, loss and the number of images."""
    from locality.data import DataConfig

    parser = Parser(
        "eval",
        "Top-1 and top-5 accuracy of a model; of a run on its own data unless told otherwise.",
    )
    parser.add_argument("run", nargs="?", default=None, help=MODEL)
    parser.add_argument("--weights", default=None, help="the same, by name")
    add_model_options(parser)
    parser.add_argument("--img_size", type=int | None, default=None, help="side in pixels")
    parser.add_argument("--batch_size", type=int, default=256, help="images at once")
    parser.add_argument("--precision", default="fp32", help="fp32, bf16-mixed or auto")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_class_arguments(DataConfig, "data")
    words = with_aliases(arguments, {"--data": "--data.dataset"})
    options = parser.read(words)
    if (options.run is None) == (options.weights is None):
        raise UserError("give one model to evaluate, by itself or as --weights")
    what = options.weights if options.run is None else options.run

    from locality.checkpoints.open import is_run_folder
    from locality.commands.opening import open_given
    from locality.training import RunFolder, evaluate_opened

    opened, seed = open_given(what, options), 0
    if is_run_folder(what):
        config = RunFolder(what).config()
        seed = config.seed
        given = {word.partition("=")[0] for word in words}
        if "--data.dataset" not in given or options.data.dataset == config.data.dataset:
            # Options change the run's own data; another dataset starts from nothing.
            defaults = {f"data.{name}": value for name, value in vars(config.data).items()}
            parser.set_defaults(defaults)
            options = parser.read(words)
    result = evaluate_opened(
        opened,
        DataConfig(**vars(options.data)),
        seed=seed,
        img_size=options.img_size,
        batch_size=options.batch_size,
        precision=options.precision,
    )
    if options.json:
        print(json.dumps(result))
        return
    print(
        f"top-1 {result['top1']:.2f}%  top-5 {result['top5']:.2f}%  loss {result['loss']:.4f}  "
        f"on {result['n']} images of {result['dataset']}"
    )
