"""What the models are built on: positional attention, the block, and the faster forward passes."""
