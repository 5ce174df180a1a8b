"""Plans: what an instance makes of a problem once, to be called many times."""
