"""EvoRL's collectives, updates and shards at 1, 2, 3 ranks, against NumPy and torch on the whole."""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import on_ranks

from rank0rl.compat import _evorl_axes, evorl
from rank0rl.compat._evorl_axes import named, tree_map
from rank0rl.mpi import comm

RANKS = [1, pytest.param(2, marks=pytest.mark.slow), 3]
Pair = namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass(frozen=True)
class State:
    params: Any
    steps: int = 0


def same(a, b):
    """Trees of the same form, kinds, dtypes and shapes, with equal numbers."""
    x, y = named(a), named(b)
    if list(x) != list(y) or type(a) is not type(b):
        return False
    for these in zip(x.values(), y.values(), strict=True):
        if len({type(leaf) for leaf in these}) > 1:
            return False
        p, q = (np.asarray(leaf) for leaf in these)
        if (p.dtype, p.shape) != (q.dtype, q.shape) or not np.allclose(p, q, equal_nan=True):
            return False
    return True


class Checks:
    """Names of what is not as expected."""

    def __init__(self):
        self.wrong = []

    def __call__(self, name, got, expected):
        self.wrong += [] if same(got, expected) else [f"{name}: {got!r}, not {expected!r}"]


def tree(r):
    return {
        "dict": OrderedDict(z=np.arange(3) + r, a=torch.full((2, 2), float(r)).T),
        "list": [r, 0.5 * r, None],
        "tuple": (np.float32(r), Pair(torch.tensor(r), np.empty((0, 2), "f4"))),
        "state": State(torch.full((2,), r, dtype=torch.float16)),
        "few": np.array([r], np.int8),
    }


def on_rank_collectives():
    r, n = comm.rank, comm.nworkers
    check = Checks()
    of_ranks = [tree(i) for i in range(n)]
    np_of = {"psum": np.sum, "pmean": np.mean, "pmax": np.max, "pmin": np.min}
    for name, op in np_of.items():

        def whole(*xs, name=name, op=op):
            x = xs[0]
            out = op(np.stack([np.asarray(each) for each in xs]), axis=0)
            if isinstance(x, torch.Tensor):
                keep = name != "pmean" or x.is_floating_point()
                return torch.as_tensor(out).to(x.dtype if keep else torch.float32)
            if isinstance(x, int | float):
                return out.item()
            dtype = np.float32 if name == "pmean" and x.dtype.kind == "i" else x.dtype
            return np.asarray(out).astype(dtype)[()]

        mine = tree(r)
        for axis in ("DP", "POP", "P", ("POP", "DP")):
            check(name, getattr(evorl, name)(mine, axis), tree_map(whole, *of_ranks))
        check(f"{name} unchanged", mine, tree(r))
        check(f"{name} of none", getattr(evorl, name)(mine), mine)
    # The same names in another order: by name, not by place.
    x = {"a": 1.0, "b": 10.0} if r == 0 else {"b": 10.0, "a": 1.0}
    check("order", dict(sorted(evorl.psum(x, "DP").items())), {"a": 1.0 * n, "b": 10.0 * n})

    def stacked(*xs):
        if isinstance(xs[0], torch.Tensor):
            return torch.stack(xs)
        return np.stack(xs) if isinstance(xs[0], np.ndarray | np.generic) else np.array(xs)

    check("all_gather", evorl.all_gather(tree(r), "DP"), tree_map(stacked, *of_ranks))
    check("all_gather of none", evorl.all_gather(tree(r)), tree(r))
    parts = [torch.arange(6).reshape(2, 3) + 10 * i for i in range(n)]
    check("axis", evorl.all_gather(parts[r], "DP", axis=1), torch.stack(parts, 1))
    for axis in (0, 1, -1):
        tiled = evorl.all_gather(parts[r], "DP", axis=axis, tiled=True)
        check(f"tiled {axis}", tiled, torch.cat(parts, axis))
    check("several", evorl.all_gather(r, ("POP", "DP")), np.arange(n))
    check("unpmap", evorl.unpmap(tree(r), evorl.PMAP_AXIS_NAME), tree(0))
    check("unpmap of none", evorl.unpmap(tree(r)), tree(r))
    check("who", [evorl.is_dist_initialized(), evorl.get_process_id()], [n > 1, 0])
    ranks = evorl.get_global_ranks()
    check("ranks", ranks, np.arange(n, dtype=np.int32))
    keys = evorl.split_key_to_devices(7, ranks)
    check("keys", evorl.all_gather(keys[r] % 1000, "DP"), np.array(keys) % 1000)
    return check.wrong


def on_rank_axes():
    """Two axes: of 1 x n, n x 1 and back to all ranks."""
    r, n = comm.rank, comm.nworkers
    check = Checks()
    for dp, pop in ((1, n), (n, 1)):
        mesh = evorl.use_axes(DP=dp, POP=pop)
        check(f"DP={dp}", evorl.psum(1, "DP"), dp)
        check(f"POP={pop}", evorl.all_gather(r, "POP"), np.arange(n) if pop == n else np.array([r]))
        both = evorl.all_gather(r, ("POP", "DP")), evorl.psum(1, ("DP", "POP"))
        check("both", both, (np.arange(n), n))
        check("place", [mesh.index("DP"), mesh.index("POP")], [r * (dp > 1), r * (pop > 1)])
    evorl.use_axes(island=n)
    check("island", evorl.pmax(r, "island"), n - 1)
    said = []
    for use in (
        lambda: evorl.psum(1, "DP"),
        lambda: evorl.psum(1, ("island", "island")),
        lambda: evorl.use_axes(DP=n, POP=2),
        lambda: evorl.use_axes(DP=-n, POP=-1),
    ):
        try:
            use()
        except ValueError as error:
            said.append(str(error))
    check("errors", len(said), 4)
    check("unknown", "must be None or one of island" in said[0] and "got 'DP'" in said[0], True)
    check("twice", "got ('island', 'island')" in said[1], True)
    evorl.use_axes()
    check("again", evorl.psum(1, "POP"), n)
    return check.wrong


def data(r):
    """Uneven rows, none on rank 1."""
    x = np.random.default_rng(r).normal(size=([4, 0, 3][r], 2))
    return torch.from_numpy(x)


def loss_fn(params, x, scale=1.0):
    error = (x @ params["w"] - params["b"][0]).square()
    return scale * error.sum() if len(x) else torch.tensor(0.0)  # depends on nothing


class Momentum:
    """Of optax's interface: a state, and nothing in place."""

    @staticmethod
    def init(params):
        return tree_map(torch.zeros_like, params)

    @staticmethod
    def update(grads, state, params=None):
        state = tree_map(lambda v, g: 0.9 * v + g, state, grads)
        return tree_map(lambda v: -0.01 * v, state), state


def start():
    w, b = torch.ones(2).double(), torch.tensor(0.5).double()
    return {"w": w, "b": [b], "unused": torch.ones(1)}


def by_torch(make, steps, shards):
    """Parameters after steps of torch's optimizer on the mean of the losses of shards."""
    params = tree_map(lambda p: p.clone().requires_grad_(), start())
    optimizer = make(list(named(params).values()))
    for _ in range(steps):
        optimizer.zero_grad()
        total = sum(loss_fn(params, shard) for shard in shards) / len(shards)
        (total + 0 * params["unused"].sum()).backward()
        optimizer.step()
    return tree_map(torch.Tensor.detach, params)


def by_hand(steps, shards):
    """As `Momentum`, on the mean of the losses of shards."""
    params = tree_map(lambda p: p.clone().requires_grad_(), start())
    every = named(params).values()
    momentum = [torch.zeros_like(p) for p in every]
    for _ in range(steps):
        total = sum(loss_fn(params, shard) for shard in shards) / len(shards)
        total = total + 0 * params["unused"].sum()
        options = {"allow_unused": True, "materialize_grads": True}
        grads = torch.autograd.grad(total, list(every), **options)
        momentum = [0.9 * v + g for v, g in zip(momentum, grads, strict=True)]
        with torch.no_grad():
            for p, v in zip(every, momentum, strict=True):
                p.sub_(0.01 * v)
    return tree_map(torch.Tensor.detach, params)


def on_rank_updates():
    r, n = comm.rank, comm.nworkers
    check = Checks()
    expected = by_hand(3, [data(i) for i in range(n)])
    update = evorl.gradient_update(loss_fn, Momentum, pmap_axis_name=("POP", "DP"))
    params = first = start()
    opt_state = Momentum.init(params)
    first_loss = update(opt_state, params, data(r))[0]
    check("pure", update(opt_state, params, data(r))[0], first_loss)
    check("loss", first_loss, loss_fn(start(), data(r)))
    check("no history", [first_loss.requires_grad], [False])
    for _ in range(3):
        _, params, opt_state = update(opt_state, params, data(r))
    check("params", params, expected)
    check("unchanged", first, start())

    def with_aux(state, x, scale=1.0):
        return loss_fn(state.params, x, scale), {"rows": len(x), "w": state.params["w"] * 1}

    agent, opt_state = State(start(), 5), Momentum.init(start())
    update = evorl.agent_gradient_update(with_aux, Momentum, "DP", has_aux=True)
    for _ in range(3):
        (_, aux), agent, opt_state = update(opt_state, agent, data(r), scale=1.0)
    check("agent", agent, State(expected, 5))
    check("aux", [aux["rows"], aux["w"].requires_grad], [len(data(r)), False])

    update = evorl.agent_gradient_update(with_aux, Momentum, pmap_axis_name="P", has_aux=True)
    _, agent, _ = update(Momentum.init(start()), State(start()), data(r))
    check("P", agent.params, by_hand(1, [data(i) for i in range(n)]))

    # By default no average over ranks; and a state of one's own.
    update = evorl.agent_gradient_update(
        lambda state, x: loss_fn(state["p"], x),
        Momentum,
        attach_fn=lambda state, params: {**state, "p": params},
        detach_fn=lambda state: state["p"],
    )
    _, state, _ = update(Momentum.init(start()), {"p": start()}, data(r))
    check("alone", state, {"p": by_hand(1, [data(r)])})
    return check.wrong


def on_rank_shards():
    r, n = comm.rank, comm.nworkers
    check = Checks()
    ran = []

    def fn(x, w):
        ran.append(r)
        return {"sum": x["a"].sum() * w}, x["b"] + w

    a, b, w = np.arange(24.0).reshape(6, 4), torch.arange(6.0), np.arange(6.0)
    expected = {"sum": a.sum(1) * w}, b + torch.from_numpy(w).float()
    for mesh in (None, evorl.use_axes(DP=1, POP=n)):
        ran.clear()
        mapped = evorl.shmap_map(fn, mesh, ("POP", ("POP",)), ("POP", "POP"))
        out = mapped({"a": a, "b": b}, w)
        check("map", out[0], expected[0])
        check("map, tensors", out[1].float(), expected[1])
        check("only its rows", len(ran), 6 // n)
    batched = evorl.shmap_vmap(lambda x, y: {"z": x * y.sum()}, mesh, "POP", "POP")
    check("vmap", batched(w, a), {"z": w * a.sum(1)})
    t = torch.from_numpy
    check("vmap, tensors", batched(t(w), t(a)), {"z": t(w * a.sum(1))})
    check("one for all", evorl.shmap_vmap(torch.square, mesh, None, None)(b), b**2)
    check("one spec", evorl.shmap_vmap(torch.square, mesh, ("POP",), ("POP",))(b), b**2)
    said = []
    for use in (
        lambda: evorl.shmap_map(fn, mesh, "POP", ("POP",))({"a": a, "b": b}, w),
        lambda: evorl.shmap_map(fn, mesh, ("POP", None, None), "POP")(a, w),
        lambda: evorl.shmap_vmap(torch.square, mesh, "POP", "POP")(torch.ones(3 * n + 1)),
        lambda: batched(w, a[: 6 // n]) if n > 1 else batched(w, a[:3]),
        lambda: evorl.shmap_map(fn, mesh, "ROWS", "POP")(a, w),
    ):
        try:
            use()
        except ValueError as error:
            said.append(str(error))
    check("errors", len(said), 4 + (n > 1 or len(said) == 5))
    check("results", "as many specs as fn has results, 2: got 1" in said[0], True)
    check("arguments", "as many specs as fn has arguments, 2: got 3" in said[1], True)
    evorl.use_axes()
    return check.wrong


def on_rank_wrong():
    """Something else on the last rank; then a sum that works: nobody was left behind."""
    last = comm.rank == comm.nworkers - 1
    said = []
    rows = np.ones(comm.nworkers + (last and comm.nworkers > 1))
    for specs in ("DP", (None, ("DP",))):
        try:
            evorl.shmap_map(lambda x: (x, x), None, "DP", specs)(rows)
        except ValueError as error:
            said.append(f"ValueError: {error}")
    for mine in (
        {"a": 1.0, "b": 2.0} if last else {"a": 1.0},
        {"a": torch.zeros(2, device="meta") if last else torch.zeros(2)},
        {"a": np.zeros(2 + last)},
        {"a": "word" if last else 1.0},
    ):
        for use in (evorl.psum, evorl.all_gather, evorl.unpmap):
            try:
                use(mine, "DP")
                said.append("nothing")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    return [said, evorl.psum(1, "DP")]


def on_rank_evorl():
    parts = [on_rank_collectives(), on_rank_axes(), on_rank_updates(), on_rank_shards()]
    return [*parts, on_rank_wrong()]


@pytest.mark.parametrize("n", RANKS)
def test_tools_are_as_on_the_whole(n):
    """One job for all, because to start one takes seconds."""
    results = on_ranks(n, "test_evorl:on_rank_evorl") if n > 1 else [on_rank_evorl()]
    assert [result[:4] for result in results] == [[[], [], [], []]] * n
    said = results[0][4][0]
    assert [result[4] for result in results] == [[said, n]] * n
    if n > 1:
        assert [text for text in said if not text.startswith("ValueError: ")] == []
        assert all(f"rank {n - 1}" in text for text in said)
        assert "x['b']" in said[2]
        for text in said[:2]:
            assert f"shmap: rank {n - 1}: the number of rows must be a multiple of the {n}" in text


@pytest.mark.parametrize("rank", range(6))
def test_six_ranks_are_two_by_three(rank, monkeypatch):
    """Ranks with the same color are an axis; six of them would take long to start."""
    monkeypatch.setattr(comm, "get_rank", lambda comm=None: rank)
    monkeypatch.setattr(comm, "split", lambda color: color)
    colors = {
        ("DP",): [0, 1, 2, 0, 1, 2],
        ("POP",): [0, 0, 0, 3, 3, 3],
        ("DP", "POP"): [0, 0, 0, 0, 0, 0],
    }
    expected = {frozenset(axes): of_ranks[rank] for axes, of_ranks in colors.items()}
    assert _evorl_axes._along({"DP": 2, "POP": 3}) == expected


def test_neighbours_of_several_axes_differ_along_the_last_one(monkeypatch):
    monkeypatch.setattr(comm, "get_nworkers", lambda comm=None: comm)
    sizes = {"DP": 2, "POP": 3, "P": 2}
    counts = {frozenset(sizes): 12, frozenset(["DP", "POP"]): 6, frozenset(["POP"]): 3}
    mesh = evorl.Mesh(sizes, counts)
    ranks = np.arange(12).reshape(2, 3, 2)  # of DP, POP, P
    assert mesh.order("POP") == [0, 1, 2]
    assert mesh.order(("DP", "POP")) == [0, 1, 2, 3, 4, 5]
    assert mesh.order(("POP", "DP")) == [0, 3, 1, 4, 2, 5]
    several = [ranks[dp, pop, p] for p in range(2) for dp in range(2) for pop in range(3)]
    assert mesh.order(("P", "DP", "POP")) == several


def on_rank_two_axes():
    """Two by two: the numbers of this row, of this column, and of all in both orders."""
    evorl.use_axes(DP=2, POP=2)
    r = comm.rank
    axes = ("POP", "DP", ("DP", "POP"), ("POP", "DP"))
    gathered = [evorl.all_gather(torch.tensor(r), axis).tolist() for axis in axes]
    found = [gathered, evorl.psum(r, axes[-1]), evorl.unpmap(r, "POP"), evorl.unpmap(r, axes[-1])]
    evorl.use_axes()
    return found


@pytest.mark.slow
def test_four_ranks_are_two_by_two():
    whole = [[0, 1, 2, 3], [0, 2, 1, 3]]
    assert on_ranks(4, "test_evorl:on_rank_two_axes") == [
        [[[0, 1], [0, 2], *whole], 6, 0, 0],
        [[[0, 1], [1, 3], *whole], 6, 0, 0],
        [[[2, 3], [0, 2], *whole], 6, 2, 0],
        [[[2, 3], [1, 3], *whole], 6, 2, 0],
    ]


def test_the_axis_of_an_update_has_two_names_and_one_value():
    for make in (evorl.gradient_update, evorl.agent_gradient_update):
        with pytest.raises(TypeError, match="are one argument: got both"):
            make(loss_fn, Momentum, dp_axis_name="DP", pmap_axis_name="P")
    with pytest.raises(TypeError, match="dp_axis_name"):
        evorl.gradient_update(loss_fn, Momentum)


@pytest.mark.parametrize(
    "key",
    [
        7,
        np.random.SeedSequence(7),
        np.random.default_rng(7),
        np.array([1, 2], np.uint32),
        torch.tensor(7),
    ],
    ids=lambda key: type(key).__name__,
)
def test_keys_of_devices_differ_and_depend_on_the_key_alone(key):
    def number(key):
        if isinstance(key, np.random.SeedSequence):
            return tuple(key.generate_state(2))
        return key.random() if isinstance(key, np.random.Generator) else str(key)

    keys = evorl.split_key_to_devices(key, range(3))
    assert all(type(each) is type(key) for each in keys)
    again = [number(each) for each in evorl.split_key_to_devices(key, range(3))]
    more = [number(each) for each in evorl.split_key_to_devices(key, range(5))]
    assert [number(each) for each in keys] == again == more[:3]
    assert len({*more, number(key)}) == 6


def test_what_is_no_key():
    with pytest.raises(TypeError, match="key must be integers"):
        evorl.split_key_to_devices(np.ones(2), range(2))


def test_a_tree_on_a_device():
    put = evorl.tree_device_put({"a": [np.ones(2), torch.zeros(1)], "b": 3}, "meta")
    assert [leaf.device.type for leaf in named(put).values()] == ["meta"] * 3
    x = np.ones(2)
    on_cpu = evorl.tree_device_put((x,), "cpu")[0]
    x += 1
    assert on_cpu.tolist() == [1, 1]


def test_an_optimizer_of_torch_makes_its_steps_and_changes_nothing_in_place():
    def make(params):
        return torch.optim.Adam(params, lr=0.1)

    optimizer = evorl.TorchOptimizer(make)
    update = evorl.gradient_update(loss_fn, optimizer, None)
    params = first = start()
    state = before = optimizer.init(params)
    for _ in range(3):
        _, params, state = update(state, params, data(0))
    assert same(params, by_torch(make, 3, [data(0)]))
    assert same(first, start())
    once, again = (update(state, params, data(0))[1] for _ in range(2))
    assert same(once, again)
    assert before["state"] == {}


def test_an_optimizer_of_torch_wants_the_parameters():
    optimizer = evorl.TorchOptimizer(lambda params: torch.optim.SGD(params, lr=0.1))
    params = {"a": torch.ones(1)}
    with pytest.raises(ValueError, match="pass params"):
        optimizer.update(params, optimizer.init(params))
