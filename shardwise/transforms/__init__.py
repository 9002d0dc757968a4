"""Pure functions plan -> plan, and the lowering of a plan to a program."""
