"""What every operation is made of: arrays, checks, kernel configurations, plans, launches."""
