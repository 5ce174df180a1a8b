"""Private and undocumented names of other libraries: a module for each library, a substitute for each name."""
