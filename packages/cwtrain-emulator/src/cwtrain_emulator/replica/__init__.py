"""Replicas: one process each, which materialise snapshots on disk and serve their weights."""
