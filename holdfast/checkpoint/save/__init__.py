"""Saving: handshake of the ranks, staging, and handing the image to the writer."""
