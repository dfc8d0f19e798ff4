"""Reference models, written once for one process and split over given groups."""
