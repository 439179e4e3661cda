"""Click log to checkpoint: readers, encoder, heads, classifier table, batching, losses, metrics."""
