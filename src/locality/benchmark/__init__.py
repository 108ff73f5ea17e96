"""Speed and memory beside a peer with the same weights, measured in the same process."""
