"""CvT's architecture search (§4.2): its space, a supernet of all candidates, and the search."""

from locality.search.space import Cost as Cost
from locality.search.space import SearchSpace as SearchSpace
from locality.search.space import cost as cost
