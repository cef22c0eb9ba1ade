"""Ranks and what moves between them; starting and watching them. No word of reinforcement learning."""
