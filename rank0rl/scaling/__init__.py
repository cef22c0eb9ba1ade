"""Speedup studies and the scaling model."""
