"""EvoRL's distributed tools on arrays and tensors. A rank stands for one of EvoRL's devices."""

from __future__ import annotations

from rank0rl.compat._evorl_comm import (
    all_gather,
    get_global_ranks,
    get_process_id,
    is_dist_initialized,
    pmax,
    pmean,
    pmin,
    psum,
    split_key_to_devices,
    unpmap,
)
from rank0rl.compat._evorl_gradients import (
    GradientTransformation,
    TorchOptimizer,
    agent_gradient_update,
    gradient_update,
)
from rank0rl.compat._evorl_mesh import (
    DP_AXIS_NAME,
    PMAP_AXIS_NAME,
    POP_AXIS_NAME,
    Mesh,
    use_axes,
)
from rank0rl.compat._evorl_sharding import shmap_map, shmap_vmap, tree_device_put

__all__ = [
    "DP_AXIS_NAME",
    "PMAP_AXIS_NAME",
    "POP_AXIS_NAME",
    "GradientTransformation",
    "Mesh",
    "TorchOptimizer",
    "agent_gradient_update",
    "all_gather",
    "get_global_ranks",
    "get_process_id",
    "gradient_update",
    "is_dist_initialized",
    "pmax",
    "pmean",
    "pmin",
    "psum",
    "shmap_map",
    "shmap_vmap",
    "split_key_to_devices",
    "tree_device_put",
    "unpmap",
    "use_axes",
]
