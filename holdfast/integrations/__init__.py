"""Holdfast inside the frameworks that people train with: one file for each, behind an extra.

Nothing in Holdfast imports this room, and importing it imports no framework.
"""
