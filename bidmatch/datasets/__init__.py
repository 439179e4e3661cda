"""Public data sets, written as files that `bidmatch` reads."""
