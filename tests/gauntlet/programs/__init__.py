"""One program a module; each has `build() -> Built`."""
