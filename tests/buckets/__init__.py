"""Checkpoints in object stores."""
