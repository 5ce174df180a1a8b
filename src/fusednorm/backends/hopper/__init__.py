"""Gluon kernels for NVIDIA Hopper and later: data stay on the chip between the statistics and the results."""
