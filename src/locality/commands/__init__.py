"""The commands: each reads its options and calls the room that does the work."""
