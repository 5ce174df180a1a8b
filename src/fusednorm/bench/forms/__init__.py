"""Norms with the work around them in one call, against the same expressions in several calls."""
