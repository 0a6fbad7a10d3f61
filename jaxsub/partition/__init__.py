"""Cut a program into stages, and find what a stage may save: slices, minimum cuts, inner programs."""
