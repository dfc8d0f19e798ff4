"""Which checkpoints stay: policies, tags, and safe removal. Torch-free."""
