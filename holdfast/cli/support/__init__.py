"""What the commands share: arguments, steps, keys, elements, comparison, tables and messages."""
