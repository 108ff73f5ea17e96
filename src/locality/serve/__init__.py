"""A page and an endpoint to try a model: an image in; classes, and what every head looks at, out.

`application` is what is answered, `decoding` leads from the bytes of an image to its pixels, and
`server` says who is answered, and how long anybody is waited for.
"""
