"""The machine at hand: its description, its clocks, and its limits."""
