"""Ranks, and the collectives that move data between them. No word of reinforcement learning."""
