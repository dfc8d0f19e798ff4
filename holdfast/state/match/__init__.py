"""Matching what a load requests with what a checkpoint stores."""
