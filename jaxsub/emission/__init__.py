"""Write a program anew by its plan: regions, gradient barriers, rewritten loops, offload."""
