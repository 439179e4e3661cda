"""What every stage shares and no stage owns: errors, text normalisation, whole-file writes, progress."""
