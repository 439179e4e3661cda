"""Dataset readers: what users have on disk becomes one Dataset."""
