"""The bundle: its format, and the reading and searching side, which needs neither torch nor transformers."""
