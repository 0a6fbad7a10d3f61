"""Devices to compile for, present or absent, and the memory that their compilers allocate."""
