"""`locality explore`: one page in which one clicks a patch and sees what every head looks at."""

from __future__ import annotations

from collections.abc import Sequence

from locality.commands.parsing import MODEL, Parser, add_model_options


def main(arguments: Sequence[str]) -> None:
    """Write the explorer and print its path."""
    parser = Parser(
        "explore",
        "Write one self-contained HTML page: click a patch of an image and see what every head of "
        "every layer looks at, by content, by position, and mixed; up to four models side by side.",
    )
    parser.add_argument("models", nargs="+", help=f"each a {MODEL}")
    add_model_options(parser)
    parser.add_argument(
        "--images", nargs="+", default=None, help="files or folders; a run's own unless given"
    )
    parser.add_argument("--count", type=int, default=8, help="how many images at most")
    parser.add_argument("--output", default="explorer.html", help="the file to write")
    options = parser.read(arguments)

    from locality import checks
    from locality.analysis.explorer import write_explorer
    from locality.commands.opening import image_files, open_given, read_image, run_images

    checks.integer("count", options.count, 1)
    subjects = [open_given(model, options) for model in options.models]
    if options.images is None:
        shown = run_images(options.models[0], options.count)
    else:
        files = list(image_files(options.images))[: options.count]
        shown = [(file.name, read_image(file)) for file in files]
    names, images = [name for name, _ in shown], [image for _, image in shown]
    print(write_explorer(subjects, images, options.output, names))
