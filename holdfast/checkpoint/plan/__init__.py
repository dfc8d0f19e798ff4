"""Planning a save: claims of ranks, the proof that they cover, and who writes which box."""
