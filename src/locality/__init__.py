"""Convolutional vision transformers in PyTorch: ConViT, CvT and the DeiT baseline."""
