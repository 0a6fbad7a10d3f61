"""The device to compile for, present or absent, and what its compiler allocates."""
