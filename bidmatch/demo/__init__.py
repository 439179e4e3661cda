"""A simulated ads click log, and the whole chain run on it."""
