"""Arithmetic on boxes and columns of integers: one of each kind, numpy alone. Torch-free."""
