"""Trees: names and order of leaves, and what is built again."""

import dataclasses
from collections import OrderedDict, namedtuple
from types import MappingProxyType
from typing import Any

from rank0rl.compat._evorl_axes import named, tree_map

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Data:
    a: Any
    b: Any


TREE = {
    "p": Point(1, [2, None]),
    "d": Data(3, {}),
    "o": OrderedDict(z=4, a=(5,)),
    "m": MappingProxyType({"k": 6}),
}


def test_leaves_come_in_order_with_their_names():
    found = {"x['p'][0]": 1, "x['p'][1][0]": 2, "x['d']['a']": 3, "x['o']['z']": 4}
    found |= {"x['o']['a'][0]": 5, "x['m']['k']": 6}
    assert [*named(TREE).items()] == [*found.items()]
    assert named(3) == {"x": 3}


def test_the_same_form_with_other_leaves():
    other = tree_map(lambda x: -x, TREE)
    assert other["p"] == Point(-1, [-2, None])
    assert other["d"] == Data(-3, {})
    assert type(other["o"]) is OrderedDict
    assert other["o"] == OrderedDict(z=-4, a=(-5,))
    assert other["m"] == {"k": -6}
    assert TREE["p"].x == 1


def test_leaves_of_other_trees_are_found_by_their_names():
    assert tree_map(lambda x, y: x - y, {"a": 1, "b": 2}, {"b": 20, "a": 10}) == {"a": -9, "b": -18}
