"""The machine at hand: what it is, its clocks, and what it can do at best."""
