"""The kernels, written for Triton; imported only to plan a problem.

Names: ``p_`` pointers, ``b_`` block values, ``o_`` offsets, ``m_`` masks; ``alpha`` the activation's parameter in the
dtype of the computation. A pointer that a problem has no use for is None, and no code that reads it is compiled. Sums
are in the compute dtype, which is also the dtype of saved statistics and of partials.
"""
