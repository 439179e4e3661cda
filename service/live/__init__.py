"""Live phrases: added, changed, paused and removed while the service runs, without a new bundle."""
