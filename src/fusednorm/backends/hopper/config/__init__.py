"""The configurations of the instances, and their choice: pure functions of the problem."""
