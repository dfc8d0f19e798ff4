"""The state of several modules: each one's parts under its name, on its layout.

A checkpoint of several modules is one state whose part names begin with the module's:
`vision.model`, `vision.optimizer`, `language.model`. Keys do not say where a module was, so it
loads on other ranks, under another layout, next to other modules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast.errors import ConfigError
from holdfast.parallel import ModuleGroups
from holdfast.state.markers import OnLayout
from holdfast.state.module_rng import ModuleRNG
from holdfast.state.rng import RNG


def module_parts(
    groups: ModuleGroups,
    modules: Mapping[str, Mapping[str, object]],
    *,
    without: Collection[str] = (),
) -> dict[str, object]:
    """The state of the modules that this rank has, as parts for a `Checkpointer`.

        parts = module_parts(groups, {"vision": {"model": encoder, "optimizer": {}}})
        checkpointer.save(step, {**parts, "progress": progress})

    The checkpointer runs on `groups.union`, which spans all modules. Each part gets the name
    `<module>.<part>` and its module's layout (`OnLayout`), so that nothing of it depends on which
    ranks the module is on or on what rank 0 has. What belongs to no module (progress, a schedule
    for all) is put next to them by its own name, equal on all ranks.

    Args:
        groups: the modules and where they are.
        modules: for each module of this rank its parts by name; whatever a state may hold.
        without: modules that are left out on purpose, on every rank: for a load that does not
            want them, or a save that does not keep them.

    Raises:
        ConfigError: A module of this rank is missing and not in `without`, or is there and in
            `without`; a part's name is empty; several modules here have an `RNG()`, which are the
            same streams (`ModuleRNG` gives each its own).
        LayoutError, GroupError: There is no such module, or it is not on this rank.

    Cost: none; nothing is read.
    """
    for module in (*without, *modules):
        groups.layouts[module]  # LayoutError names those that there are
    for module in modules:
        groups[module]  # GroupError says where it is
        if module in without:
            raise ConfigError(f"module '{module}' is given, and listed in without=: choose one")
    forgotten = [name for name in groups.modules if name not in modules and name not in without]
    if forgotten:
        raise ConfigError(
            f"rank {groups.rank} has module '{forgotten[0]}', whose state is not given: it would "
            f"be lost. Give it, or leave it out on all ranks with without=['{forgotten[0]}']"
        )
    _refuse_shared_streams(groups.rank, modules)
    parts: dict[str, object] = {}
    for module, named in modules.items():
        for part, value in named.items():
            if not isinstance(part, str) or not part:
                raise ConfigError(f"module '{module}': a part needs a name, got {part!r}")
            parts[f"{module}.{part}"] = OnLayout(groups[module], value)
    return parts


def _refuse_shared_streams(rank: int, modules: Mapping[str, Mapping[str, object]]) -> None:
    """ConfigError where two modules of this rank would store the process's own streams."""
    sharing = [
        f"'{module}.{part}'"
        for module, named in modules.items()
        for part, value in named.items()
        if isinstance(value, RNG) and not isinstance(value, ModuleRNG)
    ]
    if len(sharing) > 1:
        raise ConfigError(
            f"rank {rank}: {' and '.join(sharing)} are the same streams, those of the process: "
            f"each module would draw from where the other stopped. Give each a "
            f"ModuleRNG(seed=...) and run it in `with` of that"
        )
