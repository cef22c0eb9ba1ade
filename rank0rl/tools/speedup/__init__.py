"""Speedup studies, and a cost model that predicts the steps per second of more ranks."""
