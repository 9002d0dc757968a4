"""Kernels: one pass over memory where torch needs several, each with a reference in torch."""
