"""What surrounds the payload of a data file, so that other programs open it as their own.

An *envelope* is a pure function from chunks to an image: bytes that are known when a save is
planned, and places of payloads. Rows of the index address payload bytes, whatever is around them.
`layout_in` lays out in either of two:

- `safetensors`: a header in front of all chunks (`holdfast.format.index.layout_image`).
- `torch_dist`: each chunk as the item of PyTorch DCP that `torch.save` would write
  (`torch_dist.py`), and files next to the data files that DCP and Megatron-core begin with.

The other modules describe what torch writes: pickles without the module that runs them
(`pickle_output.py`), ZIP archives (`torch_archive.py`), values and optimizers as PyTorch has them
(`plain_values.py`, `optimizer_trees.py`), and the metadata of DCP (`dcp_metadata.py`).
"""

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
