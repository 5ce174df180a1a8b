"""Whole models, written once with the norms as an argument: with torch's norms against with fusednorm's."""
