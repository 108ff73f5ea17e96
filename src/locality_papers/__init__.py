"""A study of ConViT and CvT with `locality`: the tables and figures of both papers as experiments,
with the published numbers and an answer to each of the papers' questions.
"""
