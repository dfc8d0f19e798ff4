"""Faults put into one tensor on one device, which spread as they do through a parallel model."""
