"""Workloads, the judge of their results, and side-by-side timing."""
