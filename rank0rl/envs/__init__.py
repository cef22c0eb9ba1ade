"""Environments: made, wrapped, stepped, checked, and kept alive."""
