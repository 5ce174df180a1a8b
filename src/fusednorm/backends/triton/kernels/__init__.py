"""The kernels, written for Triton; imported only to plan a problem.

Names: ``p_`` pointers, ``b_`` block values, ``o_`` offsets, ``m_`` masks. A pointer that a problem has no use for is
None, and what depends on it is not compiled. Accumulation is in the dtype of the statistics' pointers.
"""
