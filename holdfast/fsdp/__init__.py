"""Fully sharded models: torch's FSDP2 on the communicators of a layout, with its traps closed.

A model with declared units and experts comes in; a `ShardedModel` goes out. `plan.py` gives each
parameter to the innermost unit around all of its places, so that a tied one is whole wherever it is
used. `data_axes.py` makes the mesh of each kind: dense over `dp_cp`, experts over `expt_dp`.
`agreement.py` compares structure and bytes of all parameters between ranks before anything changes,
because shards are cut by position from what each rank holds.

Units are made of FSDP2's pieces (`_torch.py`, the one file with its private names), not by
`fully_shard` alone: a unit has one group of parameters for each kind and dtype, each with its own
communicators and divisor. Reductions run on the mesh's communicators, gathers on the `_ag` clone.
The divisor is dp · cp for both kinds. If a rank holds whole parameters (`no_shard`, `expt_dp` of 1)
FSDP2 divides by its factor once, twice or three times, depending on the dtype, so it is given 1 and
a hook divides. The four strategies are settings of this one mechanism (`SCHEDULES`). Checkpoints
need nothing special: state is DTensors.

Which unit runs next is known to the model alone, so `prefetch.py` records it in each forward. Every
gather and reduction goes through `launch_log.py`, so that ranks can complete after an error what
others have launched. A reduction also tells which parameters no rank has used (`UseCounts`), which
are left without a gradient. What is reduced follows `requires_grad`, so ranks change that alike
(`trained.py`).

Read first: `model.py`, `plan.py`, `sharded_model.py`.
"""

from holdfast.fsdp.model import fully_shard_model
from holdfast.fsdp.sharded_model import (
    OuterReduction,
    ShardedModel,
    ShardedModelStepper,
    Strategy,
)

__all__ = ["OuterReduction", "ShardedModel", "ShardedModelStepper", "Strategy", "fully_shard_model"]
