"""The page of `holdfast view`: one HTML file that needs no network. Imports no torch."""
