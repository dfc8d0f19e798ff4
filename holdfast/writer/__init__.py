"""From staged bytes to a committed checkpoint, without torch."""
