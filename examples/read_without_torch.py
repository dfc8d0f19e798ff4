"""Tensors and values of the newest checkpoint as NumPy arrays: no torch, no model, one process.

python examples/read_without_torch.py runs/one
"""

from __future__ import annotations

import sys

import numpy as np

from holdfast import PosixStorage
from holdfast.arrays.boxes import Box
from holdfast.format.dtypes import DTYPES
from holdfast.format.names import latest_step, step_dir
from holdfast.format.reader import Snapshot
from holdfast.format.values import decode_tree

storage = PosixStorage(sys.argv[1])
step = latest_step(storage)
if step is None:
    sys.exit(f"{sys.argv[1]} holds no checkpoint")

with Snapshot.open(storage, step_dir(step)) as snapshot:
    print(f"step {step}, saved by torch {snapshot.manifest.torch}")
    for key in snapshot.keys:
        info = snapshot.tensor(key)
        kind = DTYPES[info.dtype].numpy
        if kind is None:  # bfloat16 and 8-bit floats, which NumPy lacks
            print(f"{key}: {info.dtype} {tuple(info.shape)}")
            continue
        array = np.empty(tuple(info.shape), kind)
        box = Box((0,) * array.ndim, array.shape)  # any part of the tensor: only its bytes are read
        snapshot.read_box(key, box, memoryview(array.reshape(-1)).cast("B"))
        print(f"{key}: {info.dtype} {array.shape}, mean {array.mean():.6f}")
    for part in snapshot.manifest.parts:
        if part == "progress":
            print(f"{part}: {decode_tree(snapshot.read_values(part))}")
