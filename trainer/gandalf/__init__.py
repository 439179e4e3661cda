"""Gandalf: label texts as further training queries, with soft targets from the label graph."""
