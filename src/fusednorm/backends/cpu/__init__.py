"""Kernels for any CPU, compiled by Numba; see compiler.py for how a kernel becomes machine code.

Importing this package imports neither Numba nor llvmlite.
"""
