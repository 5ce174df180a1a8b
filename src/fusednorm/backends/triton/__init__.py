"""Triton kernels for every GPU that Triton reaches. Importing this package imports neither triton nor a kernel."""
