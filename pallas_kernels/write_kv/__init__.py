"""Writing a step's new keys and values into pages. Start at `api`."""
