"""The tree of values in a checkpoint, in lines for a screen: long things are summed up. No torch.

A tensor is one line with dtype and shape; what holds only tensors is one line with their
number and size; numbers in rows are one line with their shape; of many members the first are shown.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text
from rich.tree import Tree

from holdfast.cli.support.messages import shape_in_words
from holdfast.errors import HoldfastError, clean, counted, in_bytes
from holdfast.format.manifest import TensorInfo
from holdfast.format.values import (
    MAPPINGS,
    SCALARS,
    SEQUENCES,
    SETS,
    Node,
    count_values,
    decode_tree,
    is_per_rank,
    is_tensor,
    join_path,
    members,
    shorten,
    tag_of,
    tensor_keys,
    wrapped,
)

MAX_MEMBERS = 40
"""Members of one container that are shown."""

_MAX_DEPTH = 40
_MAX_WIDTH = 80


def value_tree(part: str, node: Node, *, tensors: Mapping[str, TensorInfo]) -> Tree:
    """A part as a tree of lines.

    Args:
        part: its name.
        node: its values, as the manifest has them.
        tensors: what the manifest says about each key.
    """
    tree = Tree(Text(clean(part), style="bold"))
    builder = _TreeBuilder(tensors)
    if builder.is_one_line(node):
        tree.label = _label(part, builder.line(node, part))
    else:
        builder.grow(tree, node, part, depth=0)
    return tree


class _TreeBuilder:
    """Makes lines of nodes, with dtypes and shapes from the manifest."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._tensors = tensors

    def grow(self, tree: Tree, node: Node, path: str, *, depth: int) -> None:
        """Add the members of a container to a tree, scalars on the line of their name."""
        below_it = _members(node)
        shown = below_it[:MAX_MEMBERS]
        for name, child in shown:
            below = f"{path}[{name}]" if is_per_rank(node) else join_path(path, name)
            branch = tree.add(_label(name, self.line(child, below)))
            if not self.is_one_line(child):
                if depth < _MAX_DEPTH:
                    self.grow(branch, child, below, depth=depth + 1)
                else:
                    branch.add(Text("…; --json shows the rest", style="dim"))
        if len(shown) < len(below_it):
            rest: list[Node] = [child for _, child in below_it[len(shown) :]]
            keys = list(tensor_keys(rest))
            what = f", {self._total(keys)} in them" if keys else ""
            more = f"… and {len(rest):,} more{what}; --json lists all"
            tree.add(Text(more, style="dim"))

    def is_one_line(self, node: Node) -> bool:
        """Return True if a node is shown by `line` alone, in full or summed up."""
        return not _members(node) or _row_shape(node) is not None or self._is_all_tensors(node)

    def line(self, node: Node, path: str) -> str:
        """One line for a node: the value of a scalar, the kind of a container."""
        if is_tensor(node):
            return self._tensor(node, path)
        if _members(node) and self._is_all_tensors(node):
            return self._total(list(tensor_keys(node)))
        shape = _row_shape(node)
        if shape is not None:
            return clean(f"numbers {shape_in_words(shape)}: {shorten(repr(node), limit=60)}")
        return clean(_in_words(node))

    def _tensor(self, node: dict[str, Node], path: str) -> str:
        key = str(node.get("k"))
        info = self._tensors.get(key)
        what = str(tag_of(node))
        if info is not None:
            what += f" {info.dtype} {shape_in_words(info.shape)}"
        return clean(what if key == path else f"{what}, stored as {key}")

    def _is_all_tensors(self, node: Node) -> bool:
        if is_tensor(node):
            return False
        return next(tensor_keys(node), None) is not None and count_values(node) == 0

    def _total(self, keys: list[str]) -> str:
        sizes = [self._tensors[key].nbytes for key in set(keys) if key in self._tensors]
        return f"{counted(len(keys), 'tensor')}, {in_bytes(sum(sizes))}"


def _label(name: str, line: str) -> Text:
    """A name and its line."""
    return Text(clean(name), style="bold") + Text(f": {line}")


def _members(node: Node) -> list[tuple[str, Node]]:
    """Return what a container shows below itself; empty for a node that one line shows."""
    node = wrapped(node)
    inside = members(node)
    is_row = isinstance(node, list) or tag_of(node) in (*SEQUENCES, *SETS)
    if is_row and _is_flat([child for _, child in inside]):
        return []
    is_named_by_node = tag_of(node) in MAPPINGS
    return [(_in_words(name) if is_named_by_node else str(name), child) for name, child in inside]


def _is_scalar(node: Node) -> bool:
    """Return True if a node is one plain value."""
    if isinstance(node, list):
        return False
    return not isinstance(node, dict) or tag_of(node) in SCALARS


def _is_flat(items: list[Node]) -> bool:
    """Return True if a list reads best on one line."""
    return all(map(_is_scalar, items))


def _row_shape(node: Node) -> tuple[int, ...] | None:
    """The shape of numbers in rows of equal length, two dimensions or more; None for the rest."""
    shape = _number_shape(node) if isinstance(node, list) else None
    return shape if shape is not None and len(shape) > 1 else None


def _number_shape(node: Node) -> tuple[int, ...] | None:
    """As `_row_shape`, but () for a number and one dimension for a row of them."""
    if not isinstance(node, list):
        return () if _is_number(node) else None
    shapes = {_number_shape(item) for item in node}
    inner = shapes.pop() if len(shapes) == 1 else None
    return None if inner is None else (len(node), *inner)


def _is_number(node: Node) -> bool:
    """Return True if a node is a number; a bool is not."""
    if isinstance(node, dict):
        return tag_of(node) in ("int", "float", "complex")
    return isinstance(node, int | float) and not isinstance(node, bool)


def _in_words(node: Node) -> str:
    """A node on one line, without what is below it."""
    if isinstance(node, str):
        return shorten(repr(node))
    if isinstance(node, list):
        return _list_in_words(node)
    if not isinstance(node, dict):
        return str(node)
    tag, inner = tag_of(node), node.get("v")
    if tag is None:
        return f"dict of {len(node)}" if node else "{}"
    if is_tensor(node):
        return f"{tag} {node.get('k')}"
    if tag == "per_rank":
        axes = node.get("axes")
        return f"per rank over {', '.join(map(str, axes)) if isinstance(axes, list) else axes}"
    if tag in SCALARS and tag != "enum":
        return shorten(_decoded(node))
    name = f" {node['n']}" if "n" in node else ""
    if isinstance(inner, list) and _is_flat(inner):
        return f"{tag}{name} {_list_in_words(inner)}"
    if isinstance(inner, list):
        return f"{tag}{name} of {len(inner)}"
    if isinstance(inner, dict):
        return f"{tag}{name}"
    return f"{tag}{name} {shorten(repr(inner)) if inner is not None else ''}".rstrip()


def _list_in_words(items: list[Node]) -> str:
    """A flat list on one line: all of it, or its length and the first members."""
    if not _is_flat(items):
        return f"list of {len(items):,}"
    shown: list[str] = []
    width = 2
    for item in items:
        word = shorten(_decoded(item), limit=40)
        width += len(word) + 2
        if width > _MAX_WIDTH:
            return f"list of {len(items):,}: [{', '.join(shown)}, …]"
        shown.append(word)
    return f"[{', '.join(shown)}]"


def _decoded(node: Node) -> str:
    """A scalar as Python writes it."""
    try:
        return repr(decode_tree(node)) if isinstance(node, dict) else repr(node)
    except HoldfastError:  # a type that only its program knows
        return shorten(repr(node))
