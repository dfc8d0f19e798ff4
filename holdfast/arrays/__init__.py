"""Arithmetic on boxes and columns of integers: one of each kind, numpy alone. Torch-free.

It is below everything, so that there is one box, one tiling proof and one packed column for plan,
format and load. The tiling of the boxes of a tensor is proved by a random multilinear identity,
linear in the rows for any number of dims and any irregularity; bisection then locates flaws.

Read first: `boxes.py`, `box_table.py`.
"""
