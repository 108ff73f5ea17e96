"""A page and an endpoint to try a model: an image in; classes, and what heads look at, out."""
