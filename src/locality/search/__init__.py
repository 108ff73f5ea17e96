"""CvT's architecture search (§4.2): its space, a supernet of all candidates, and the search."""

from __future__ import annotations

from locality.search.space import Cost, SearchSpace, cost

__all__ = ["Cost", "SearchSpace", "cost"]
