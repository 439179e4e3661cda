"""Encoders Φ: token ids to one vector a text."""
