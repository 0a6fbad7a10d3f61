"""Programs are imported where their libraries are: `run.py` says which are missing."""

collect_ignore_glob = ["programs/*"]
