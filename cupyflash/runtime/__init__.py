"""The common parts of all operations: arrays, checks, kernel configurations, plans, launches."""
