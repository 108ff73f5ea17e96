"""CvT's architecture search (§4.2): search space, supernet and search."""
