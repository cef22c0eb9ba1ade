"""docs/names.md: every name that users of the four families know, where to import it, and its test."""

import importlib
import re
from pathlib import Path

import pytest

from rank0rl import compat
from rank0rl.compat import mpi_util

ROOT = Path(__file__).parent.parent
TABLES = (ROOT / "docs" / "names.md").read_text()

# Heading of the table -> module, and the names that it must have.
FAMILIES = {
    "mpi_util": (
        "rank0rl",
        "mpi_fork rank nworkers tf_config set_global_seeds rank0_accum_batches all_accum_batches "
        "rank0_bcast_wts all_sum all_mean all_avg_wts bcast print0 steps_sec timeit chksum "
        "accum_batches all_sum_scalar all_mean_scalar cumsum_steps",
    ),
    "mpi_tools": (
        "rank0rl.compat.mpi_tools",
        "mpi_fork msg proc_id num_procs allreduce broadcast mpi_op mpi_sum mpi_avg "
        "mpi_statistics_scalar",
    ),
    "mpi_pytorch": (
        "rank0rl.compat.mpi_pytorch",
        "setup_pytorch_for_mpi mpi_avg_grads sync_params",
    ),
    "mpi_tf": (
        "rank0rl.compat.mpi_tf",
        "MpiAdamOptimizer compute_gradients apply_gradients sync_all_params",
    ),
    "OmniSafe": (
        "rank0rl.compat.omnisafe",
        "setup_distributed get_rank is_master world_size reduce all_reduce gather all_gather "
        "broadcast scatter fork avg_tensor avg_grads sync_params avg_params dist_avg dist_sum dist_max dist_min dist_op dist_statistics_scalar",
    ),
    "EvoRL": (
        "rank0rl.compat.evorl",
        "DP_AXIS_NAME POP_AXIS_NAME PMAP_AXIS_NAME psum pmean pmax pmin all_gather unpmap "
        "get_process_id get_global_ranks is_dist_initialized split_key_to_devices gradient_update "
        "agent_gradient_update shmap_map shmap_vmap tree_device_put",
    ),
}


def rows(heading):
    """Name -> the other cells of its row."""
    [section] = re.findall(rf"^#+ {heading}\n(.*?)(?=^#|\Z)", TABLES, re.DOTALL | re.MULTILINE)
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("| `")
    ]
    return {name.strip("`"): rest for name, *rest in cells}


def test_every_name_that_is_absent_is_in_its_table():
    table = rows("Names of mpi_util that are not here")
    assert table == {name: [remedy] for name, remedy in compat.ABSENT.items()}
    assert not compat.ABSENT.keys() & {*mpi_util.__all__}


@pytest.mark.parametrize("heading", FAMILIES)
def test_every_name_is_in_its_table_and_where_it_is_said_to_be(heading):
    module, names = FAMILIES[heading]
    assert list(rows(heading)) == names.split()
    home = importlib.import_module(module)
    for name in names.split():
        of_optimizer = name in ("compute_gradients", "apply_gradients")
        assert getattr(home.MpiAdamOptimizer if of_optimizer else home, name) is not None


@pytest.mark.parametrize("heading", FAMILIES)
def test_every_name_is_explained_and_tested(heading):
    for name, (what, differs, tests) in rows(heading).items():
        assert all([what, differs]), f"{name} has an empty cell"
        named = re.findall(r"`tests/((?:\w+/)?\w+\.py)(?:::(\w+))?`", tests)
        assert named, f"{name} has no test"
        for file, function in named:
            path = ROOT / "tests" / file
            assert path.exists(), f"{name} is tested in {file}, which does not exist"
            if function:
                assert re.search(rf"^def {function}\(", path.read_text(), re.MULTILINE), function
