"""What the commands share: arguments, opening checkpoints, tables and messages."""
