"""`nn.Module` as a part of the state."""
