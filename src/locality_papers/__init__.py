"""A study of ConViT and CvT with `locality`: the tables and figures of both papers as experiments,
beside the numbers they print and an answer to each question.
"""
