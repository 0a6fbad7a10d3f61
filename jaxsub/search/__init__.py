"""From a program and settings to a verified plan: candidate plans, compiles, the plan cache."""
