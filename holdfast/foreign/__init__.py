"""Formats that people have: read as if they were our own, written, and converted.

In comes a path to a checkpoint that another program wrote; out comes a `Catalog` (what tensors
there are, in which byte ranges of which files, and the tree of values), and from it a read-only
`Storage` in which the engine and every command see a checkpoint like any other. Nothing of a
foreign file is ever run: pickles are interpreted by a closed list of inert types.

- A *format* is one module: `detect` by content, `open` to a catalog, `write` from one.
- `CatalogStorage` shows a catalog as a checkpoint without digests: manifest and index are made in
  memory, data files are ranges of the foreign ones.
- A name map turns one catalog into another: renamed, split, joined, transposed, cast.
- `convert` streams a catalog into another format under a budget of memory, and proves the result.
- Of several ranks one opens a checkpoint, and the others open it from what it has read
  (`shared_opening`).

Read first: `catalog.py`, `view.py`, `formats.py`.
"""

from __future__ import annotations

from holdfast.foreign.catalog import Catalog, CatalogTensor
from holdfast.foreign.convert import ConvertOptions, open_any, plan_conversion
from holdfast.foreign.formats import open_catalog
from holdfast.foreign.name_map import NameMap
from holdfast.foreign.name_map_presets import load_preset, preset_names
from holdfast.foreign.rules import (
    cast,
    drop,
    join,
    pad,
    rename,
    rotary,
    split,
    stack,
    tie,
    transpose,
    trim,
    unstack,
    untie,
)

__all__ = [
    "Catalog",
    "CatalogTensor",
    "ConvertOptions",
    "NameMap",
    "cast",
    "drop",
    "join",
    "load_preset",
    "open_any",
    "open_catalog",
    "pad",
    "plan_conversion",
    "preset_names",
    "rename",
    "rotary",
    "split",
    "stack",
    "tie",
    "transpose",
    "trim",
    "unstack",
    "untie",
]
