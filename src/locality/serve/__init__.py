"""A web page and HTTP endpoints that classify images and show the attention of all heads.

`application` defines the endpoints, `decoding` turns image files into pixels in separate processes,
and `server` checks hosts and enforces timeouts.
"""
