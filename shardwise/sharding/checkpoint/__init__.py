"""A state on disk: global tensors by name, written and read in slices."""
