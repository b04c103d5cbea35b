"""Finds the bucket capacities that make a run fastest, on its first training steps."""
