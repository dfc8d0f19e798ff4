"""Benchmarks: Holdfast, PyTorch DCP and the physical floor, side by side in one run.

    python -m bench [--quick] [--only CASE] [--out bench/out] [--baseline FILE]

Every number is the median of interleaved repeats after a warm-up; what counts is the ratio to the
floor, a program that only moves the same bytes. See docs/performance.md.
"""
