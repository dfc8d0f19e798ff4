"""Arithmetic on boxes and columns of integers, with numpy alone. Torch-free.

In come boxes and columns; out come others. This room is below all others, so that plan, format and
load share one box, one tiling proof and one packed column. A random multilinear identity proves
that boxes tile a tensor, in time linear in the rows for any number of dims and any irregularity.
Bisection then locates flaws.

Read first: `boxes.py`, `box_table.py`.
"""
