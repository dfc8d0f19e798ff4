"""Agreement between the ranks of a layout: transport, frames, deadlines, the guard."""
