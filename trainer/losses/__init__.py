"""Multi-class losses, one a file, each on (scores, positives, weights): used on any head, in either direction."""
