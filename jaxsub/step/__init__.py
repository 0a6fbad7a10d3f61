"""Whole train steps: `jit(memory=...)`, the budgets of the functions inside, the largest batch."""
