"""Run timm's tests of its models on ours.

    pip download --no-binary :all: --no-deps timm==1.0.31 && tar xzf timm-1.0.31.tar.gz
    python benchmarks/timm_suite.py timm-1.0.31/tests/test_models.py -k "not pretrained"

The test file is from timm's source distribution; this script substitutes the list of models. Our
models return tokens, so they replace timm's ViTs in its "non-standard" list, whose features are not
maps. TorchScript, which PyTorch has deprecated, is not supported. Tests of pretrained weights
download them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import timm

import locality.timm  # noqa: F401  registers the models

_list_models = timm.list_models


def ours(
    filter: str | Sequence[str] = "",
    module: str | Sequence[str] = "",
    exclude_filters: str | Sequence[str] = "",
    **options: Any,
) -> list[str]:
    """`timm.list_models` with our models instead of its vision transformers."""
    of_maps = "vit_*" in exclude_filters and options.get("include_tags")
    by_name = filter and "vit_*" not in filter
    return [] if of_maps or by_name else _list_models("locality_*", **options)


if __name__ == "__main__":
    timm.list_models = ours
    file, *arguments = sys.argv[1:]
    if "-k" in arguments:
        place = arguments.index("-k") + 1
        arguments[place] = f"locality_ and ({arguments[place]})"
    else:
        arguments += ["-k", "locality_"]
    sys.exit(pytest.main([file, "-p", "no:cacheprovider", "-W", "ignore", *arguments]))
