"""Losses, one a file, each on (scores, positives, weights): for any head, in either direction."""
