"""A page and an endpoint to try a model: an image in; classes, and what every head looks at, out.

`application` is what is answered, and `server` says who is answered.
"""
