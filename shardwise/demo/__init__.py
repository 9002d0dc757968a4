"""The main job: a byte-level GPT on the source of the Python standard library."""
