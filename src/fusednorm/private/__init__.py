"""Private and undocumented names of other libraries, one module per library, and what happens without each name."""
