"""Offload: host memory and files that tensors rest in, and what streams them."""
