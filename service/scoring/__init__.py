"""Offline scoring: a whole query log to matches, each distinct query once, in bounded memory."""
