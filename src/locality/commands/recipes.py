"""`locality recipes`: the named training runs."""

from __future__ import annotations

from collections.abc import Sequence

from locality.commands.parsing import Parser


def main(arguments: Sequence[str]) -> None:
    """List the recipes, or show one with every value."""
    from locality.training.recipes import RECIPES, describe, recipe
    from locality.training.settings import to_yaml

    parser = Parser("recipes", "List the training recipes, or show one in full.")
    parser.add_argument("name", nargs="?", default=None, help="a recipe, to see all its values")
    name = parser.read(arguments).name
    if name is None:
        width = max(map(len, RECIPES))
        print("\n".join(f"{key:<{width}}  {describe(key).splitlines()[0]}" for key in RECIPES))
        return
    config = recipe(name)
    print(describe(name), to_yaml(config), sep="\n\n", end="")
