"""A layout as the manifest keeps it, and back."""

from __future__ import annotations

from holdfast.format.manifest import LayoutInfo
from holdfast.parallel.layout import DEFAULT_ORDER, Layout


def layout_info(layout: Layout) -> LayoutInfo:
    """A layout as the manifest keeps it."""
    # Spelled out, because the manifest keeps them: a new field of `Layout` must not change the
    # format by itself.
    names = ("tp", "cp", "ep", "dp", "pp", "expt_tp", "replicas")
    axes = {name: getattr(layout, name) for name in names}
    return LayoutInfo(name=layout.name, axes=axes, order=layout.order, ranks=list(layout.ranks))


def layout_of(info: LayoutInfo) -> Layout:
    """The layout that a manifest describes; LayoutError or TypeError where it is none."""
    order = info.order or DEFAULT_ORDER
    return Layout(name=info.name, order=order, ranks=info.ranks, **info.axes)
