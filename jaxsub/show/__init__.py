"""Plans shown: as text of 80 columns, as a page for notebooks and browsers, and as matplotlib axes."""
