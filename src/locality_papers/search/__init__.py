"""CvT's architecture search (§4.2): search space, supernet and search."""

from __future__ import annotations

from typing import TYPE_CHECKING

from locality.lazy import lazily

if TYPE_CHECKING:
    from locality_papers.search.space import Cost as Cost
    from locality_papers.search.space import SearchSpace as SearchSpace
    from locality_papers.search.space import cost as cost

__all__, __getattr__ = lazily(__name__, __file__)
