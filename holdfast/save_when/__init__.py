"""When to save: policies (torch-free), and the decision that all ranks take together."""
