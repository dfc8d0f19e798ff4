"""What the bytes of a checkpoint mean: manifest, index, data file images, values. Torch-free."""
