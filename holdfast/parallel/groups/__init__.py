"""The communicators of a layout, or of the layouts of several modules.

In comes a layout that every rank believes it shares, or communicators that the caller made. Out
comes `ProcessGroups`: communicators by name, device meshes on exactly these, and a `Control`. For
several modules it is `ModuleGroups`: one `ProcessGroups` for each module, for each edge between two
modules, and for the union of all ranks.

Creation has three phases: plan (which groups, on this rank alone), meet (all ranks compare their
plans over the store, before there is a communicator), make (in one order, on all ranks or on none).

Read first: `process_groups.py`, what callers use and the three phases; `planned_groups.py`, the
plan; `rendezvous.py`, how ranks meet.
"""
