"""The commands: each reads its options and calls the package that does the work."""
