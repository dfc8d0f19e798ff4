"""The envelopes by name."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.format.envelopes.torch_dist import layout_torch_dist
from holdfast.format.index import Image, ImageEntry, layout_image
from holdfast.format.manifest import Envelope


def layout_in(envelope: Envelope, entries: Sequence[ImageEntry]) -> Image:
    """Lay out a data file in an envelope; equal entries give equal bytes.

    Raises:
        PlanError: See `layout_image`.

    Cost: linear in entries.
    """
    return layout_torch_dist(entries) if envelope == "torch_dist" else layout_image(entries)
