"""Predict what a load would read of which file, from the plan it would make; nothing is read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.arrays.box_table import BoxTable
from holdfast.arrays.types import IntArray
from holdfast.checkpoint.load.read_plan import plan_reads
from holdfast.format.checkpoint_files import CheckpointFiles
from holdfast.format.stored_copies import choose_copies


def forecast_reads(
    files: CheckpointFiles, tables: Sequence[BoxTable], *, ranks: Sequence[int]
) -> IntArray:
    """Return the bytes that each rank reads from each data file if every rank reads for itself.

    So do ranks of one host (`exchange="auto"`), which is assumed for the choice between copies, and
    all ranks with `exchange=False`; with verification.

    Args:
        files: The checkpoint; no data file is opened.
        tables: The boxes that each rank requests, by position.
        ranks: The global rank of each, for the choice between copies.

    Returns:
        (ranks, files) bytes.

    Raises:
        CorruptionError: The chunks do not cover a requested box.

    Cost: that of `plan_reads` for each rank.
    """
    manifest, index = files.manifest, files.index
    itemsize = manifest.forms.itemsize
    # Without an exchange no rank reads for another: who wrote a file does not matter to the plan.
    nobody = np.full(len(manifest.files), -1, dtype=np.int64)
    nbytes = np.zeros((len(tables), len(manifest.files)), dtype=np.int64)
    writers = [file.writer for file in manifest.files]
    is_near = np.isin(writers, ranks)
    for position, (table, rank) in enumerate(zip(tables, ranks, strict=True)):
        plan = plan_reads(
            index,
            [table],
            itemsize=itemsize,
            writer=nobody,
            hosts=np.zeros(1, dtype=np.int64),
            grain=manifest.block_nbytes or 1,
        )
        row = plan.row
        if files.has_copies:
            row = choose_copies(
                index,
                files.copies,
                row,
                is_own=np.array(writers, dtype=np.int64) == rank,
                is_near=is_near,
                position=position,
            )
        np.add.at(nbytes[position], index.file[row], plan.stop - plan.start)
    return nbytes
