"""Process groups of a layout: created, adopted, cloned, verified, owned."""
