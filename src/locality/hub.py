"""The Hugging Face hub, where it may not be reachable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_TIMEOUT = 3  # seconds


@contextlib.contextmanager
def offline_unless_reachable() -> Iterator[None]:
    """Where the Hugging Face hub does not answer at once, use its cache alone in the block.

    Its own client asks again and again for half a minute.
    """
    from huggingface_hub import constants, utils

    offline = constants.HF_HUB_OFFLINE
    try:
        utils.get_session().head(constants.ENDPOINT, timeout=_TIMEOUT)
    except Exception:  # of whichever HTTP library the client uses
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
