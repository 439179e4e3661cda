"""What every stage shares and no stage owns: errors, text normalisation, opening and writing files, progress."""
