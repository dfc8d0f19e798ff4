"""Optimizers as parts of the state, everything by parameter name."""
