"""Gradient steps of networks, compiled. `rank0rl.nets.update` alone opens this folder."""
