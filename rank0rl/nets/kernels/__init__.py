"""Gradient steps of networks, compiled. `rank0rl.nets.update` alone opens this folder."""

# Ways to differentiate the loss of a minibatch, whose networks are computed in kernels.
CLOSED = "compiled"
LOSS = "compiled, loss by torch"
OUTPUTS = "compiled, policy and loss by torch"
