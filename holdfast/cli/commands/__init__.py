"""The commands of `holdfast`, one module each."""
