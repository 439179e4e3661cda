"""What every stage shares and no stage owns: errors, text normalisation, input and output files, progress."""
