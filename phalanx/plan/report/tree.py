"""Parts of a step as a tree, with numbers that add up as they are printed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from phalanx.plan.types import Mark, Part

_MARKS: tuple[Mark, ...] = ("measured", "derived", "assumed")


@dataclass
class Node:
    """A part, or a group of parts.

    Attributes:
        name: last word of its path.
        path: all of it.
        seconds: of it and all below it.
        part: the part of just this path; None for a mere group.
    """

    name: str
    path: str
    seconds: float = 0.0
    part: Part | None = None
    children: list[Node] = field(default_factory=list)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Node]]:
        """This node and all below it, with how deep each lies."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


def make_tree(parts: Sequence[Part]) -> Node:
    """The parts under one root called ``step``, those that cost most first; parts without any time are left out.

    A path that is a part and has parts below it, such as ``optimizer`` beside ``optimizer/norms``, keeps what is its
    own in a child called ``rest``.
    """
    root = Node("step", "")
    nodes: dict[str, Node] = {"": root}
    for part in parts:
        if part.seconds:
            _put(nodes, part)
    for node in list(nodes.values()):
        if node.part is not None and node.children:
            node.children.append(Node("rest", node.path, node.part.seconds, node.part))
            node.part = None
    _order(root)
    return root


def _put(nodes: dict[str, Node], part: Part) -> None:
    node = nodes[""]
    node.seconds += part.seconds
    names = part.path.split("/")
    for depth, name in enumerate(names, 1):
        path = "/".join(names[:depth])
        if path not in nodes:
            nodes[path] = Node(name, path)
            node.children.append(nodes[path])
        node = nodes[path]
        node.seconds += part.seconds
    node.part = part if node.part is None else _joined(node.part, part)


def _joined(one: Part, other: Part) -> Part:
    """Two parts of one path."""
    source = one.source if one.source == other.source else f"{one.source}; {other.source}"
    mark = max(one.mark, other.mark, key=_MARKS.index)
    return Part(one.path, one.seconds + other.seconds, mark, source)


def _order(node: Node) -> None:
    node.children.sort(key=lambda child: (child.name == "rest", -child.seconds))
    for child in node.children:
        _order(child)


def marks_of(node: Node) -> set[Mark]:
    """How the parts at and below a node are known."""
    return {below.part.mark for _, below in node.walk() if below.part is not None}


def pruned(node: Node, least_s: float) -> Node:
    """The tree without its smallest leaves: those of a group are one, and a group that is small has none.

    Args:
        least_s: seconds below which a part is small.
    """
    if not node.children:
        return node
    if node.path and abs(node.seconds) < least_s:
        return _as_leaf(node, node.name, node.path)
    small = [child for child in node.children if abs(child.seconds) < least_s and node.path]
    kept = [pruned(child, least_s) for child in node.children if len(small) < 2 or child not in small]
    if len(small) >= 2:
        group = Node("", node.path, sum(child.seconds for child in small), None, small)
        kept.append(_as_leaf(group, f"{len(small)} small ones", f"{node.path}/…"))
    return Node(node.name, node.path, node.seconds, node.part, kept)


def _as_leaf(node: Node, name: str, path: str) -> Node:
    """A group as one part, which rests on all that its own rest on."""
    parts = [below.part for _, below in node.walk() if below.part is not None]
    mark = max((part.mark for part in parts), key=_MARKS.index)
    source = "; ".join(dict.fromkeys(part.source for part in parts))
    return Node(name, path, node.seconds, Part(path, node.seconds, mark, source))


def rounded(root: Node, unit_s: float) -> dict[int, int]:
    """Every node's time in whole units, such that the printed numbers of a group add up to the group's.

    The total is rounded as usual; among parts, those that lost most by rounding down get what is missing.

    Args:
        unit_s: the last printed digit, seconds.

    Returns:
        Units by the `id` of the node.
    """
    leaves = [node for _, node in root.walk() if not node.children]
    wanted = round(root.seconds / unit_s)
    units = {id(node): math.floor(node.seconds / unit_s) for node in leaves}
    by_loss = sorted(leaves, key=lambda node: node.seconds / unit_s % 1, reverse=True)
    for node in by_loss[: max(wanted - sum(units.values()), 0)]:
        units[id(node)] += 1
    for node in reversed([node for _, node in root.walk()]):
        if node.children:
            units[id(node)] = sum(units[id(child)] for child in node.children)
    return units


def printed(root: Node) -> tuple[str, dict[int, str]]:
    """Every node's time as it is printed, all in one unit, to about a thousandth of the whole.

    Returns:
        The unit, and texts by the `id` of the node.
    """
    unit, scale, decimals = precision_of(root.seconds)
    ticks = rounded(root, 10.0**-decimals / scale)
    return unit, {key: f"{count * 10.0**-decimals:,.{decimals}f}" for key, count in ticks.items()}


def precision_of(total_s: float) -> tuple[str, float, int]:
    """Unit, units per second and decimals that suit a time of this length."""
    if total_s >= 1:
        return "seconds", 1.0, 3 if total_s < 100 else 1
    return ("ms", 1e3, 2) if total_s < 0.1 else ("ms", 1e3, 1)
