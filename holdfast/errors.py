"""The closed error hierarchy of Holdfast.

Every error a user can meet is a `HoldfastError`. A message says what happened, where (key, rank,
file, offset), why, and what to do. Errors that concern a group of ranks are raised on all of them.
"""

from __future__ import annotations


class HoldfastError(Exception):
    """Base class of everything Holdfast raises on purpose."""


class ConfigError(HoldfastError, ValueError):
    """A setting, flag or argument is wrong; the message names it and the fix."""


class LayoutError(HoldfastError):
    """Axis sizes, order or ranks do not describe a layout."""


class GroupError(HoldfastError):
    """A communicator is missing, is not what the layout says, or ranks disagree in a collective."""


class PlacementError(HoldfastError):
    """A tensor or value cannot be stored as declared: bad box, bad axis, no codec."""


class PlanError(HoldfastError):
    """The ranks' declarations together do not make one whole state: gap, overlap, disagreement."""


class StorageError(HoldfastError):
    """The storage refused: not found, no space, no permission, short read or write."""


class CorruptionError(HoldfastError):
    """Stored bytes are not the bytes that were saved."""


class MismatchError(HoldfastError):
    """A checkpoint and the state that asks for it do not fit each other."""


class DeadlineError(HoldfastError):
    """Somebody did not arrive in time; the message names who, and in which phase."""


class FaultError(HoldfastError):
    """A computation produced a value that the run does not accept."""
