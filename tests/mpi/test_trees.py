"""Trees: paths and order of leaves, and what is built again."""

import dataclasses
from collections import OrderedDict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest

from rank0rl.mpi import trees

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


def test_leaves_come_in_order_with_their_paths():
    found = [(("p", 0), 1), (("p", 1, 0), 2), (("d", "a"), 3), (("o", "z"), 4)]
    assert [*trees.leaves(TREE)] == [*found, (("o", "a", 0), 5), (("m", "k"), 6)]
    assert [*trees.named(TREE)][:3] == ["x['p'][0]", "x['p'][1][0]", "x['d']['a']"]
    assert trees.named(3) == {"x": 3}


@pytest.mark.parametrize(
    ("items", "paths"),
    [
        (trees.dict_items, [("p",), ("d",), ("o", "z"), ("o", "a"), ("m", "k")]),
        (
            trees.container_items,
            [("p", 0), ("p", 1, 0), ("p", 1, 1), ("d",), ("o", "z"), ("o", "a", 0), ("m", "k")],
        ),
    ],
)
def test_what_is_no_container_is_a_leaf(items, paths):
    assert [path for path, _ in trees.leaves(TREE, items)] == paths


def test_containers_are_walked_before_their_children():
    assert [path for path, _ in trees.walk({"a": [1, {}]})] == [(), ("a",), ("a", 0), ("a", 1)]


def test_the_same_form_with_other_leaves():
    other = trees.tree_map(lambda x: -x, TREE)
    assert other["p"] == Point(-1, [-2, None])
    assert other["d"] == Data(-3, {})
    assert type(other["o"]) is OrderedDict
    assert other["o"] == OrderedDict(z=-4, a=(-5,))
    assert other["m"] == {"k": -6}
    assert TREE["p"].x == 1


def test_leaves_of_other_trees_are_found_by_their_paths():
    assert trees.tree_map(lambda x, y: x - y, {"a": 1, "b": 2}, {"b": 20, "a": 10}) == {
        "a": -9,
        "b": -18,
    }


def test_a_plain_tree_has_dicts_and_lists_only():
    tree = {"m": MappingProxyType({"k": (1, Point(2, ()))})}
    new = trees.rebuilt(tree, "ab", trees.container_items, trees.plain)
    assert new == {"m": {"k": ["a", ["b", []]]}}
    assert type(new["m"]) is dict
